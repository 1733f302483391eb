"""How long a context is that nobody asked for: as the model was trained for and the memory allows."""

from __future__ import annotations

from llamaspec.llama.options import DEFAULT_CONTEXT

SHARE = 8  # a context takes at most 1 / SHARE of the memory that is free
SMALL_BYTES = 1 << 30  # and not more than the weights, or than this


def default_context_size(
    trained: int, kv_bytes_per_token: float, weights_bytes: int, room: int | None
) -> int:
    """Tokens of a context that nobody asked for.

    Parameters
    ----------
    trained : int
        Tokens that the model was trained for: never more.
    kv_bytes_per_token : float
    weights_bytes : int
    room : int, optional
        Bytes of memory that are free; None where the system does not say.

    Returns
    -------
    int
        What the model was trained for, or 4096 doubled as often as fits.

    Examples
    --------
    >>> default_context_size(131072, 32768.0, 800_000_000, 8 << 30)
    32768
    """
    n = min(DEFAULT_CONTEXT, trained)
    if room is None:
        return n
    budget = min(room // SHARE, max(weights_bytes, SMALL_BYTES))
    if trained * kv_bytes_per_token <= budget:
        return trained
    while 2 * n <= trained and 2 * n * kv_bytes_per_token <= budget:
        n *= 2
    return n
