"""Fetches a model from the Hugging Face hub, and finds the weights in what came."""

from pathlib import Path

from .request.errors import NotFound

_DESCRIPTION = ("*.json", "*.jinja", "*.txt")
_SAFETENSORS = "*.safetensors"
_PICKLED = "pytorch_model*.bin"


def weight_paths(path: Path) -> list[Path]:
    """Return the files of a directory that hold weights: safetensors or, only without them, ``pytorch_model*.bin``."""
    return sorted(path.glob(_SAFETENSORS)) or sorted(path.glob(_PICKLED))


def download(model: str) -> Path:
    """Return the directory of a hub id, cached or downloaded. Raises ``NotFound``."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(model, allow_patterns=[*_DESCRIPTION, _SAFETENSORS]))
        if not any(path.glob(_SAFETENSORS)):
            path = Path(snapshot_download(model, allow_patterns=[*_DESCRIPTION, _PICKLED]))
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise NotFound(
            f"model {model!r}: no such directory, and not to be had from the hub ({type(error).__name__})",
            field="model",
        ) from None
