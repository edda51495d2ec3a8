"""What an engine in a program is made of: the arguments of ``LLM``, with the engine's options as keywords."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig, StructuredOutputConfig
from tokenloom.process.plugins import check_plugins
from tokenloom.request.sampling_params import DEFAULT_MAX_LOGPROBS
from tokenloom.services.engine.records.engine_settings import with_gpu_defaults
from tokenloom.services.runtime.host.foreign_flags import answer_argument, is_foreign_argument
from tokenloom.services.runtime.host.options import UnknownOption, build, options_of

DEFAULTS = EngineConfig(structured_output=StructuredOutputConfig())
_DTYPES = {"float": "float32", "half": "float16"}
LOG_STATS_SECONDS = 10.0
"""As vLLM's ``VLLM_LOG_STATS_INTERVAL``."""

T = TypeVar("T")


class EngineArgs:
    """Holds the arguments of an engine in a program, which :class:`tokenloom.LLM` documents.

    Attributes:
        config: The engine's options.
        engine_process: Whether the core has a process of its own; None: as the class that runs it does by default.
        disable_log_stats: Whether no lines of statistics are logged; None: likewise.
        log_stats_interval: Seconds from one such line to the next.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        seed: int | None = 0,
        served_model_name: str | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        enable_prompt_embeds: bool = False,
        chat_template: str | Path | None = None,
        **engine: Any,
    ) -> None:
        """Raise ``TypeError`` for an unknown option, ``ValueError`` that names a wrong value."""
        self.model = model
        self.tokenizer = tokenizer
        self.seed = seed
        self.served_model_name = served_model_name
        self.max_logprobs = max_logprobs
        self.enable_prompt_embeds = enable_prompt_embeds
        self.chat_template = chat_template
        self.engine_process = _take(engine, "engine_process", bool)
        self.disable_log_stats = _take(engine, "disable_log_stats", bool)
        interval = _take(engine, "log_stats_interval", int, float)
        if interval is not None and not interval > 0:
            raise ValueError(f"log_stats_interval must be more than 0 seconds, not {interval!r}")
        self.log_stats_interval = LOG_STATS_SECONDS if interval is None else float(interval)
        plugins = _take(engine, "plugins", str, list, tuple)
        self.config = engine_config(engine, plugins or ())

    def by_default(self, *, engine_process: bool | None = None, disable_log_stats: bool | None = None) -> "EngineArgs":
        """Return the same arguments with these in place of what is not given."""
        args = copy.copy(self)
        args.engine_process = engine_process if args.engine_process is None else args.engine_process
        args.disable_log_stats = disable_log_stats if args.disable_log_stats is None else args.disable_log_stats
        return args


def _take(options: dict[str, Any], name: str, *types: type[T]) -> T | None:
    """Take an option out of others; None: it is not given. Raises ``ValueError`` for one of another type."""
    value: T | None = options.pop(name, None)
    if value is not None and type(value) not in types:
        raise ValueError(f"{name} must be of type {' or '.join(each.__name__ for each in types)}, not {value!r}")
    return value


def engine_config(keywords: Mapping[str, Any], plugins: str | Sequence[str] = ()) -> EngineConfig:
    """Return the configuration with these options; None stands for the default. ``plugins``: packages, as
    ``--plugins`` names them.

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
        elif answer := answer_argument(name, value, [*own, "plugins"]):
            raise TypeError(f"LLM() has no keyword argument {answer}")
    if "dtype" in values:
        values["dtype"] = _dtype_name(values["dtype"])
    try:
        config = build(DEFAULTS, values, strict=True)
    except UnknownOption as error:
        raise TypeError(f"LLM() has no keyword argument {error}") from None
    names = check_plugins(plugins.split(",") if isinstance(plugins, str) else plugins, "engine")
    config.check_plugins(names)
    config.kv.check_store(enable_prefix_caching=config.cache.enable_prefix_caching)
    config = replace(config, plugins=names)
    if config.parallel.group_id:
        raise ValueError("data_parallel_size: LLM runs one engine; serve a group with `tokenloom serve`")
    if config.parallel.data_parallel_backend == "ray":
        raise ValueError("data_parallel_backend: LLM computes in this program; choose distributed_executor_backend ray")
    config = with_gpu_defaults(config, values)
    if "max_num_seqs" in values:
        return config
    limits = config.scheduler
    return build(config, {"max_num_seqs": min(limits.max_num_seqs, limits.max_num_batched_tokens)})


def _dtype_name(dtype: Any) -> str:
    """Accept ``torch.float32`` and vLLM's ``"float"`` and ``"half"``."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)
