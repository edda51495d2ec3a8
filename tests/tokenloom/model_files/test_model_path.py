"""What is fetched from the hub, here from a mirror on this machine: weights for engines only, pickled ones last."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_mirror import COMMIT, HubMirror
from tokenloom.model_files.model_path import HubCache, download, resolve, served_name, weight_paths
from tokenloom.request.errors import NotFound

FILES = ("config.json", "merges.txt", "vocab.json", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack")
TEXT = {"config.json", "merges.txt", "vocab.json"}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubMirror]:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in FILES:
        (repository / name).write_text(f"{{}} of {name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubMirror(repository, "facebook/opt-125m").used() as served:
        yield served


def fetch(tmp_path: Path, model: str = "facebook/opt-125m", **options: bool) -> Path:
    return download(model, cache=HubCache(tmp_path / "cache"), **options)


@pytest.mark.parametrize("more", [(), ("model.safetensors",)])
def test_pickled_weights_are_the_last_choice(more: tuple[str, ...], tmp_path: Path, mirror: HubMirror) -> None:
    for name in more:
        (mirror.directory / name).write_text("weights")
    path = fetch(tmp_path)
    weights = [file.name for file in weight_paths(path)]
    assert weights == (list(more) or ["pytorch_model.bin"])
    assert {file.name for file in path.iterdir()} == {*TEXT, *weights} == set(mirror.downloads)


@pytest.mark.parametrize("has_index", [True, False])
def test_only_the_weights_that_are_read_are_fetched(has_index: bool, tmp_path: Path, mirror: HubMirror) -> None:
    """Repositories hold them once more, in the format of their authors or for other programs."""
    parts = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    others = {"consolidated.safetensors", "original/model.safetensors", "onnx/model.safetensors"}
    dense = {"2_Dense/config.json", "2_Dense/model.safetensors"}
    for name in parts | others | dense:
        (mirror.directory / name).parent.mkdir(exist_ok=True)
        (mirror.directory / name).write_text(f"weights of {name}")
    described = {"modules.json"}
    (mirror.directory / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    if has_index:
        index = "model.safetensors.index.json"
        described.add(index)
        weight_map = dict(zip("ab", sorted(parts), strict=True))
        (mirror.directory / index).write_text(json.dumps({"weight_map": weight_map}))
    fetch(tmp_path)
    assert set(mirror.downloads) == TEXT | described | parts | dense
    assert set(mirror.downloads.values()) == {1}


def test_parts_that_handle_text_fetch_no_weights(tmp_path: Path, mirror: HubMirror) -> None:
    path = fetch(tmp_path, weights=False)
    assert {file.name for file in path.iterdir()} == TEXT == set(mirror.downloads)
    assert path == download("facebook/opt-125m", weights=False, cache=HubCache(tmp_path / "cache", cached_only=True))


def test_a_second_fetch_sends_no_file_again(tmp_path: Path, mirror: HubMirror) -> None:
    assert fetch(tmp_path) == fetch(tmp_path) == fetch(tmp_path, "facebook/opt-125m@v1")
    assert set(mirror.downloads.values()) == {1}


def test_the_cache_alone_serves_a_model_that_is_complete(tmp_path: Path, mirror: HubMirror) -> None:
    cache = HubCache(tmp_path / "cache", cached_only=True)
    with pytest.raises(NotFound, match="the cache does not hold all of its files"):
        download("facebook/opt-125m", cache=cache)
    (mirror.directory / "model.safetensors").write_text("weights")
    fetch(tmp_path, weights=False)
    with pytest.raises(NotFound, match="the cache does not hold all of its files"):
        download("facebook/opt-125m", cache=cache)
    path = fetch(tmp_path, f"facebook/opt-125m@{COMMIT}")
    assert download("facebook/opt-125m", cache=cache) == path


def test_a_revision_belongs_to_the_model_but_not_to_its_name(tmp_path: Path, mirror: HubMirror) -> None:
    path = resolve("facebook/opt-125m@v1")
    assert path.name == COMMIT
    assert served_name(path, "facebook/opt-125m@v1") == "facebook/opt-125m"


def test_a_token_opens_a_repository(tmp_path: Path, mirror: HubMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.token = "hf_secret"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(NotFound, match="only to accounts that accepted its terms: set HF_TOKEN or HF_TOKEN_PATH"):
        fetch(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch(tmp_path) / "config.json").is_file()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("facebook/opt-9", "the hub has no facebook/opt-9, or needs a token for it"),
        ("facebook/opt-125m@v9", "the hub's facebook/opt-125m has no revision 'v9'"),
        ("a b", "'a b' is not a hub id such as org/name"),
    ],
)
def test_an_unknown_model_says_why(model: str, reason: str, tmp_path: Path, mirror: HubMirror) -> None:
    with pytest.raises(NotFound, match=f"model '{model}': no such directory, and {reason}"):
        fetch(tmp_path, model)


def test_a_hub_that_is_offline_says_so(tmp_path: Path, mirror: HubMirror) -> None:
    # Undone before the mirror ends: undone after it, the constant would stay as the mirror had set it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(NotFound, match="HF_HUB_OFFLINE=1 forbids downloads"):
            fetch(tmp_path)


def test_a_repository_without_a_model(tmp_path: Path, mirror: HubMirror) -> None:
    (mirror.directory / "config.json").unlink()
    with pytest.raises(NotFound, match=r"has no config\.json"):
        fetch(tmp_path)


@pytest.mark.parametrize("more", [(), ("consolidated.safetensors",)])
def test_a_snapshot_without_weights_is_not_complete(more: tuple[str, ...], tmp_path: Path, mirror: HubMirror) -> None:
    (mirror.directory / "pytorch_model.bin").unlink()
    for name in more:
        (mirror.directory / name).write_text("weights in the format of their authors")
    reason = r"has no weights in files that an engine reads: model\.safetensors or model-\*\.safetensors, those that"
    for cache in (HubCache(tmp_path / "cache"), HubCache(tmp_path / "cache", cached_only=True)):
        with pytest.raises(NotFound, match=reason):
            download("facebook/opt-125m", cache=cache)
        assert download("facebook/opt-125m", weights=False, cache=cache)
