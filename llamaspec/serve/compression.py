"""Compressed request bodies: gzip, deflate and zstd.

Nothing is decompressed further than a body may be large, so a bomb costs no more than any large body.
tests/serve/test_bad_requests.py.
"""

from __future__ import annotations

import sys
import zlib
from typing import Protocol

from llamaspec.serve.http_errors import RequestError

IDENTITY = "identity"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_LOG_WINDOW = 25  # 32 MiB, of zstd: as large as the largest body; a frame may ask for gigabytes


class _Decompressor(Protocol):
    """What the decompressors of zlib and zstd have in common."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


def decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body as it was before its encoding.

    RequestError if it has more than `limit` bytes, if it is damaged, or if the encoding is not known.
    """
    try:
        decompressor = _decompressor(body, encoding)
        found = decompressor.decompress(body, limit + 1)
    except RequestError:
        raise
    except Exception as error:  # zlib.error, ZstdError and others, by library
        raise RequestError(
            400, f"the body cannot be unpacked as {encoding}; check its Content-Encoding"
        ) from error
    if len(found) > limit:
        raise RequestError(413, f"the body is larger than {limit} bytes without its {encoding}")
    if not decompressor.eof:
        raise RequestError(400, f"the body is cut off: its {encoding} has no end")
    if decompressor.unused_data:
        raise RequestError(400, f"the body has more after the end of its {encoding}; send one frame")
    return found


def _decompressor(body: bytes, encoding: str) -> _Decompressor:
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(_GZIP)
    if encoding == "deflate":  # with a header, by the standard; some clients send none
        has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        return zlib.decompressobj(_ZLIB if has_header else _RAW)
    if encoding == "zstd":
        try:
            return _zstd()
        except ImportError as error:
            message = "zstd needs the package backports.zstd on the server; send the body uncompressed"
            raise RequestError(415, message) from error
    raise RequestError(415, "the body's Content-Encoding must be gzip, deflate, zstd or identity")


def _zstd() -> _Decompressor:
    if sys.version_info >= (3, 14):
        from compression.zstd import DecompressionParameter, ZstdDecompressor
    else:
        from backports.zstd import DecompressionParameter, ZstdDecompressor
    return ZstdDecompressor(options={DecompressionParameter.window_log_max: _LOG_WINDOW})
