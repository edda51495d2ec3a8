"""The engine's options as keywords of ``LLM``."""

from collections.abc import Mapping
from typing import Any

from tokenloom.engine_core.data.config import EngineConfig, StructuredOutputConfig
from tokenloom.services.runtime.host.foreign_flags import answer_argument, is_foreign_argument
from tokenloom.services.runtime.host.options import UnknownOption, build, options_of

DEFAULTS = EngineConfig(structured_output=StructuredOutputConfig())
_DTYPES = {"float": "float32", "half": "float16"}


def engine_config(keywords: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration with these options; None stands for the default.

    Raises ``TypeError`` for an unknown keyword, with similar names or with what vLLM's of this name is here, and
    ``ValueError`` that names a wrong value.
    """
    own = options_of(DEFAULTS)
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None:
            continue
        if name in own or not is_foreign_argument(name):
            values[name] = value
        elif answer := answer_argument(name, value, own):
            raise TypeError(f"LLM() has no keyword argument {answer}")
    if "dtype" in values:
        values["dtype"] = _dtype_name(values["dtype"])
    try:
        config = build(DEFAULTS, values, strict=True)
    except UnknownOption as error:
        raise TypeError(f"LLM() has no keyword argument {error}") from None
    if config.parallel.group_id:
        raise ValueError("data_parallel_size: LLM runs one engine; serve a group with `tokenloom serve`")
    if config.parallel.data_parallel_backend == "ray":
        raise ValueError("data_parallel_backend: LLM computes in this program; choose distributed_executor_backend ray")
    if "max_num_seqs" in values:
        return config
    limits = config.scheduler
    return build(config, {"max_num_seqs": min(limits.max_num_seqs, limits.max_num_batched_tokens)})


def _dtype_name(dtype: Any) -> str:
    """Accept ``torch.float32`` and vLLM's ``"float"`` and ``"half"``."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)
