"""From a name to a file, for programs: with fetching and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from command import invoke, said
from hub_server import ADDRESS, BIG, SMALL, Hub
from llamaspec.errors import ModelFileError, PairError
from llamaspec.hub.entries import Quantization
from llamaspec.hub.names import find_remote, locate_model, resolve_draft, resolve_model
from llamaspec.hub.progress import FetchProgress
from llamaspec.hub.remote import MAX_BYTES, RemoteFile


@pytest.fixture
def cache(hub: Hub, own_list: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this process, which asks the hub on this machine and knows `big` and `small`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}{''.join(template[1:])}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_list.parent / "hub"))
    monkeypatch.setenv("LLAMASPEC_CACHE", str(own_list.parent / "cache"))
    return own_list.parent / "hub"


def test_a_name_is_fetched_once(hub: Hub, cache: Path) -> None:
    told: list[FetchProgress] = []
    path = resolve_model("big", told.append)
    assert path.read_bytes() == hub.files[BIG]
    assert told
    told.clear()
    n_requests = hub.n_requests
    for name in ("big", "big:q8_0", ADDRESS, path, str(path)):
        assert resolve_model(name, told.append) == locate_model(name) == path
    assert hub.n_requests == n_requests
    assert told == []


def test_a_link_that_leads_nowhere_leads_to_the_content_again(hub: Hub, cache: Path) -> None:
    """And nothing takes the content's place: other programs look for it where it was."""
    path = resolve_model("big")
    content = path.resolve()
    path.unlink()
    path.symlink_to("nowhere")
    assert resolve_model("big") == path
    assert path.resolve() == content
    assert content.read_bytes() == hub.files[BIG]


def test_sizes_that_a_file_may_have() -> None:
    assert [Quantization("x.gguf", bytes=n).bytes for n in (1, MAX_BYTES)] == [1, MAX_BYTES]


def test_the_known_draft(hub: Hub, cache: Path) -> None:
    draft = resolve_draft("auto", "big")
    assert draft.read_bytes() == hub.files[SMALL]
    assert resolve_draft("small", "big") == resolve_draft("auto", ADDRESS) == draft
    assert resolve_draft(Path("x.gguf"), "big") == Path("x.gguf")
    with pytest.raises(PairError, match=r"no draft is known for small; name one$"):
        resolve_draft("auto", "small")


def test_an_address_may_leave_out_the_file(hub: Hub, cache: Path) -> None:
    split = "acme/split-GGUF"
    hub.files |= {"acme/two-GGUF/two-Q4_K_M.gguf": b"x", "acme/two-GGUF/two-Q4_K_S.gguf": b"x"}
    hub.files |= {"acme/two-GGUF/mmproj-two-Q4_K_M.gguf": b"x", "acme/big-GGUF/README.md": b"x"}
    assert find_remote("hf:acme/two-GGUF:q4_k_m") == RemoteFile("acme/two-GGUF", "two-Q4_K_M.gguf")
    first = find_remote(f"hf:{split}")
    assert first is not None
    assert "-00001-of-" in first.file
    for address, says in (
        ("hf:acme/two-GGUF", "has several models; name one"),
        ("hf:acme/two-GGUF:Q4_K", r"has no such model; .*two-Q4_K_M.gguf, two-Q4_K_S.gguf"),
        ("hf:acme/none", "cannot see which models acme/none has|has no such model"),
    ):
        with pytest.raises(ModelFileError, match=says):
            resolve_model(address)
    with pytest.raises(ModelFileError, match="is not on this machine"):
        locate_model("hf:acme/big-GGUF")
    n_requests = hub.n_requests
    path = resolve_model("hf:acme/big-GGUF:Q8_0")
    assert path.read_bytes() == hub.files[BIG]
    assert hub.n_requests > n_requests
    n_requests, hub.listing = hub.n_requests, b"no more answers"
    assert resolve_model("hf:acme/big-GGUF") == locate_model("hf:acme/big-GGUF:q8_0") == path
    assert hub.n_requests == n_requests


def test_the_address_of_a_page(hub: Hub, cache: Path) -> None:
    file = find_remote(ADDRESS)
    for page in ("blob/main/big-Q8_0.gguf", "resolve/main/big-Q8_0.gguf?download=true", "", "tree/main"):
        assert find_remote(f"{hub.url}/acme/big-GGUF/{page}") == file
    for page in ("acme/big-GGUF/blob/other/big-Q8_0.gguf", "acme", "acme/big-GGUF/blob/main/%2e%2e/x.gguf"):
        with pytest.raises(ModelFileError, match=r"write hf:owner/repo:file\.gguf"):
            find_remote(f"{hub.url}/{page}")
    with pytest.raises(ModelFileError, match="is no page"):
        find_remote("https://elsewhere.example/acme/big-GGUF/blob/main/big-Q8_0.gguf")


def test_looking_asks_nobody(hub: Hub, cache: Path) -> None:
    with pytest.raises(ModelFileError, match="big is not on this machine; run `llamaspec models pull big`"):
        locate_model("big")
    with pytest.raises(ModelFileError, match="small is not on this machine"):
        locate_model("small")
    assert hub.n_requests == 0


@pytest.mark.parametrize("option", ["--show", "--forget"])
@pytest.mark.parametrize(
    "naming", [("--pair", "big"), ("--target", ADDRESS), ("--target", "x.gguf", "--draft", "small")]
)
def test_a_probe_is_looked_up_without_fetching(
    hub: Hub, cache: Path, option: str, naming: tuple[str, ...]
) -> None:
    assert "on this machine" in said(invoke("probe", option, *naming)) or "x.gguf" in naming
    assert hub.n_requests == 0
    assert not cache.exists()


def test_library_errors_speak_of_no_options(cache: Path, own_list: Path) -> None:
    with pytest.raises(PairError) as raised:
        resolve_draft("auto", "small")
    assert "--" not in str(raised.value)
    assert "with --draft ngram" in said(invoke("generate", "--pair", "small", "x"))
    for name in ("nobody", "hf:acme", "small:Q4_0", "hf:a/b:../x.gguf"):
        with pytest.raises(ModelFileError) as error:
            locate_model(name)
        assert "--" not in str(error.value)
