"""The engine's options as keywords of ``LLM``."""

from collections.abc import Mapping
from typing import Any

from tokenloom.engine_core.data.config import EngineConfig, StructuredOutputConfig
from tokenloom.services.runtime.host.options import UnknownOption, build

DEFAULTS = EngineConfig(structured_output=StructuredOutputConfig())
_DTYPES = {"float": "float32"}


def engine_config(keywords: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration with these options; None stands for the default.

    Raises ``TypeError`` for an unknown keyword, with similar names, and ``ValueError`` that names a wrong value.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    if "dtype" in values:
        values["dtype"] = _dtype_name(values["dtype"])
    try:
        config = build(DEFAULTS, values, strict=True)
    except UnknownOption as error:
        raise TypeError(f"LLM() has no keyword argument {error}") from None
    if config.parallel.group_id:
        raise ValueError("data_parallel_size: LLM runs one engine; serve a group with `tokenloom serve`")
    if "max_num_seqs" in values:
        return config
    limits = config.scheduler
    return build(config, {"max_num_seqs": min(limits.max_num_seqs, limits.max_num_batched_tokens)})


def _dtype_name(dtype: Any) -> str:
    """Accept ``torch.float32`` and vLLM's ``"float"`` for ``"float32"``."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)
