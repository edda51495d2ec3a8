"""Checks the context length that the user asked for against the one of the model."""

from pathlib import Path

from tokenloom.gguf.gguf_file import is_gguf

from .refusal import CannotServe
from .small_files import read_object

_PLAIN = (None, "default")
"""Types of rotary positions that do not stretch the context."""


def check_context(path: Path, max_model_len: int | None) -> None:
    """Check ``--max-model-len`` for a checkpoint directory; the engine checks it again, for every kind of model.

    Raises `CannotServe` only for what the engine is sure to refuse: positions that are stretched, and GGUF files, pass.
    """
    if max_model_len is None:
        return
    if max_model_len < 2:
        raise CannotServe(
            f"--max-model-len {max_model_len}: give at least 2, because a request has one token of prompt and one of "
            "output"
        )
    if is_gguf(path):
        return
    config = read_object(path / "config.json")
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or any(not _is_plain(rope) for rope in ropes):
        return
    # The engine refuses it as well, but a whole mesh was started for that, and the refusal came after eleven seconds.
    if max_model_len > length:
        raise CannotServe(
            f"--max-model-len {max_model_len}: the model's context has {length} tokens (max_position_embeddings in "
            f"{path / 'config.json'}): give at most that, or leave out the option"
        )


def _is_plain(rope: object) -> bool:
    """Return whether rotary positions are not stretched, as far as is known: entries by layer kind are not read."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return rope.get("rope_type", rope.get("type")) in _PLAIN
