"""Checks the head of a GGUF file."""

from pathlib import Path

from tokenloom.gguf.gguf_file import read_gguf
from tokenloom.gpu_worker.checkpoint.gguf.names import GGUF_ARCHITECTURES

from .refusal import CannotServe
from .small_files import check_content

_KINDS = {
    "adapter": "a LoRA adapter: serve its base model, and load the adapter from a directory of the peft library",
    "mmproj": "the image encoder of a model: serve the file of the language model",
}


def check_gguf(path: Path) -> None:
    """Raise `CannotServe` for a file that is not GGUF, is not whole, or holds no model that can be served."""
    check_content(path)
    try:
        file = read_gguf(path)
    except ValueError as error:
        if "not a valid" in str(error):
            raise CannotServe(f"{path} is cut off or damaged: download it again") from None
        raise CannotServe(str(error) if "merge" in str(error) else f"{error}: download it again") from None
    kind = str(file.metadata.get("general.type", "model"))
    architecture = str(file.metadata.get("general.architecture"))
    if kind != "model" or architecture == "clip":
        reason = _KINDS.get("mmproj" if architecture == "clip" else kind, f"{kind}: serve the file of the model")
        raise CannotServe(f"{path} holds {reason}")
    if architecture not in GGUF_ARCHITECTURES:
        raise CannotServe(
            f"{path}: the architecture {architecture!r} is not read from GGUF files ({', '.join(GGUF_ARCHITECTURES)} "
            "are): serve the model's safetensors checkpoint"
        )
    _check_size(path, max((tensor.offset for tensor in file.tensors.values()), default=0))
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise CannotServe(
            f"{path} has no tokenizer (tokenizer.ggml.tokens): convert the model again with its tokenizer"
        )


def _check_size(path: Path, last_tensor: int) -> None:
    if path.stat().st_size <= last_tensor:
        raise CannotServe(
            f"{path} is cut off: it has {path.stat().st_size:,} bytes, and its last tensor begins at {last_tensor:,}: "
            "download it again"
        )
