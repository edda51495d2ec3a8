"""Writes the pages about every service's options and about who may call whom."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from msgspec import NODEFAULT

from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.runtime.host.options import Option, flag, options_of
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.peers.callers import CALLERS
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings

SERVICES: tuple[type[ServiceSettings], ...] = (
    GatewaySettings,
    TokenizerSettings,
    OutputProcessorSettings,
    CoordinatorSettings,
    EngineSettings,
    EncoderSettings,
)

_CONFIGURATION = """# Configuration

`make docs` writes this page from the code. Each service reads flags, environment variables, and a file named by
`--config` (`.toml`, `.json` or `.yaml`). A flag overrides a variable, and a variable overrides the file. The variable
of an option is `TOKENLOOM_` and its name: `--max-num-seqs 64`, `TOKENLOOM_MAX_NUM_SEQS=64` and `max_num_seqs = 64` in a
file have the same effect. In a file, an option of the engine may also stand in a table of its group, such as
`[scheduler]`. Lists are separated by commas, and the flag of a list may be given more than once.

`tokenloom serve` offers the options of the engine and of the other services, starts all services, and sets the options
by which they find each other. `LLM(...)` takes the options of the engine's groups as keywords.
"""

_CALLERS = """# Who may call whom

`make docs` writes this page from `services/runtime/peers/callers.py`. Under mutual TLS the certificate names the
caller; every certificate of the mesh may call the health checks. The gateway's own `Inference` and HTTP are public: API
keys identify their clients.

| method | callers |
|---|---|
"""


def configuration() -> str:
    """Return ``docs/reference/configuration.md``."""
    common = options_of(ServiceSettings)
    parts = [_CONFIGURATION, "\n## Every service\n\n", *_table(common.values())]
    for service in SERVICES:
        parts.append(f"\n## {service.service}\n\n`python -m tokenloom.services.{service.service}`\n")
        own = [option for option in options_of(service).values() if option.name not in common]
        for group, options in itertools.groupby(sorted(own, key=_by_group(own)), attrgetter("group")):
            if group != own[0].group:
                parts.append(f"\n### {group}\n")
            parts += ["\n", *_table(options)]
    return "".join(parts)


def callers() -> str:
    """Return ``docs/reference/callers.md``."""
    rows = (f"| `{method}` | {', '.join(sorted(who))} |\n" for method, who in CALLERS.items())
    return _CALLERS + "".join(rows)


def _by_group(options: Sequence[Option]) -> Callable[[Option], int]:
    """Return a key that sorts options by the order in which their groups first occur."""
    groups = list(dict.fromkeys(option.group for option in options))
    return lambda option: groups.index(option.group)


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| flag | value | default | |\n|---|---|---|---|\n"
    for option in options:
        flags = " ".join(f"`{flag(name)}`" for name in option.names)
        value = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind
        default = f"`{option.default_text}`" if option.default_text else ""
        text = option.text.replace("|", "\\|")
        yield f"| {flags} | {value} | {'required' if option.default is NODEFAULT else default} | {text} |\n"
