"""Finds the class of transformers that computes a checkpoint, without running code of the checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checkpoint.files.config_reader import read_architecture


class CausalClass(NamedTuple):
    """Names what computes a checkpoint."""

    model: Any
    """The class, a ``PreTrainedModel`` with a language model's head."""
    config: Any
    """The checkpoint's ``PreTrainedConfig``."""
    architecture: str


def find_causal_class(path: Path) -> CausalClass:
    """Return the class that the ``config.json`` in ``path`` names.

    Raises ``ValueError`` if transformers has no causal language model of that name.
    """
    name, values = read_architecture(path)
    model = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model, type) or not issubclass(model, transformers.PreTrainedModel):
        raise _unknown(path, name, values, transformers.__version__)
    if values.get("quantization_config"):
        raise ValueError(
            f"{path / 'config.json'}: quantization_config is not supported for {name}: use the checkpoint's "
            "unquantized weights, with --quantization int8-dynamic if memory is short"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its checks raise errors of many kinds
        raise ValueError(f"{path / 'config.json'}: transformers cannot read it: {_first_line(error)}") from error
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"{path / 'config.json'}: architectures names {name}, which is not a causal language model: use a "
            "checkpoint whose entry ends in ForCausalLM"
        )
    return CausalClass(model, config, name)


def _unknown(path: Path, name: str, values: dict[str, Any], version: str) -> ValueError:
    file = path / "config.json"
    if values.get("auto_map"):
        return ValueError(
            f"{file}: architectures names {name}, whose code is in the checkpoint (auto_map); code of checkpoints is "
            "never run: use a model whose class is part of transformers, see docs/reference/models.md"
        )
    return ValueError(
        f"{file}: architectures names {name}, which neither Tokenloom nor transformers {version} has: use a model of "
        "docs/reference/models.md, or a newer transformers if it has that class"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
