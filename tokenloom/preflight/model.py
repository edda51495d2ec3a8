"""Checks the model that the user named, before and after it is found on this machine."""

from pathlib import Path

from tokenloom.gguf.gguf_file import is_gguf

from .gguf_model import check_gguf
from .model_config import check_config
from .model_place import check_place
from .refusal import CannotServe
from .tokenizer import check_tokenizer
from .weights import check_weights

__all__ = ["check_checkpoint", "check_place"]


def check_checkpoint(path: Path, model_impl: str = "auto", load_format: str = "auto") -> None:
    """Check the configuration, the weights and the tokenizer of a checkpoint directory or GGUF file.

    With ``load_format`` dummy no weights are needed. Raises `CannotServe`.
    """
    if is_gguf(path):
        if model_impl == "transformers":
            raise CannotServe(f"{path}: GGUF files are not read with --model-impl transformers: leave out that option")
        check_gguf(path)
        return
    config = check_config(path, model_impl)
    if load_format == "auto":
        check_weights(path, config)
    check_tokenizer(path, config)
