"""What is fetched from the hub: pickled weights only where a repository has no others."""

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from tokenloom.hub_files import download, weight_paths
from tokenloom.request.errors import NotFound

OPT = ("config.json", "merges.txt", "vocab.json", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack")


class Hub:
    """A hub with one repository, which lays the files that a pattern asks for in a directory."""

    def __init__(self, directory: Path, files: tuple[str, ...]) -> None:
        self.directory = directory
        self.files = files

    def snapshot_download(self, model: str, allow_patterns: list[str]) -> str:
        if model != "facebook/opt-125m":
            raise OSError("no such repository")
        for name in self.files:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (self.directory / name).touch()
        return str(self.directory)


@pytest.mark.parametrize("more", [(), ("model.safetensors",)])
def test_pickled_weights_are_the_last_choice(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, OPT + more).snapshot_download)
    path = download("facebook/opt-125m")
    weights = [file.name for file in weight_paths(path)]
    assert weights == (list(more) or ["pytorch_model.bin"])
    assert {file.name for file in path.iterdir()} == {"config.json", "merges.txt", "vocab.json", *weights}


def test_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, OPT).snapshot_download)
    with pytest.raises(NotFound, match=r"model 'facebook/opt-9': no such directory, and not to be had from the hub"):
        download("facebook/opt-9")
