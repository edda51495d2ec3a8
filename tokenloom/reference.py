"""Pages of ``docs/`` that are written from the code: ``python -m tokenloom.reference`` writes them anew."""

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .services.coordinator.coordinator_settings import CoordinatorSettings
from .services.engine.engine_settings import EngineSettings
from .services.gateway.gateway_settings import GatewaySettings
from .services.output_processor.output_processor_settings import OutputProcessorSettings
from .services.runtime.host.service_settings import ServiceSettings
from .services.runtime.peers.callers import CALLERS
from .services.tokenizer.tokenizer_settings import TokenizerSettings

SERVICES: tuple[type[ServiceSettings], ...] = (
    GatewaySettings,
    TokenizerSettings,
    OutputProcessorSettings,
    CoordinatorSettings,
    EngineSettings,
)

_CONFIGURATION = """# Configuration

Written by `make docs` from the code. Each service takes flags, environment variables, and a file named by `--config`
(`.toml`, `.json` or `.yaml`, one table); a flag wins over a variable, a variable over the file. A variable is
`TOKENLOOM_` and the setting's name: `--max-num-seqs 64`, `TOKENLOOM_MAX_NUM_SEQS=64` and `max_num_seqs = 64` say the
same. Lists are separated by commas. `tokenloom serve` starts all services with what they must know of each other; the
variables reach them too.
"""

_CALLERS = """# Who may call whom

Written by `make docs` from `services/runtime/peers/callers.py`. Under mutual TLS the caller is who its certificate
names; health checks are open to every certificate of the mesh. The gateway's own `Inference` and HTTP are public:
clients are known by their API keys.

| method | callers |
|---|---|
"""


def configuration() -> str:
    """``docs/configuration.md``."""
    common = set(ServiceSettings.model_fields)
    parts = [_CONFIGURATION, "\n## Every service\n\n", *_table(ServiceSettings, set(ServiceSettings.model_fields))]
    for service in SERVICES:
        own = {name for name, field in service.model_fields.items() if name not in common or _differs(name, field)}
        parts += [f"\n## {service.service}\n\n`python -m tokenloom.services.{service.service}`\n\n"]
        parts += _table(service, own)
    return "".join(parts)


def callers() -> str:
    """``docs/callers.md``."""
    rows = (f"| `{method}` | {', '.join(sorted(who))} |\n" for method, who in CALLERS.items())
    return _CALLERS + "".join(rows)


PAGES = {"configuration.md": configuration, "callers.md": callers}


def _differs(name: str, field: FieldInfo) -> bool:
    inherited = ServiceSettings.model_fields[name]
    return (field.default, field.description) != (inherited.default, inherited.description)


def _table(service: type[ServiceSettings], names: set[str]) -> Iterator[str]:
    yield "| flag | value | default | |\n|---|---|---|---|\n"
    for name, field in service.model_fields.items():
        if name in names:
            text = (field.description or "").replace("|", "\\|")
            yield f"| `--{name.replace('_', '-')}` | {_kind(field.annotation)} | {_default(field)} | {text} |\n"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default in (None, "", ()):
        return ""
    if isinstance(field.default, tuple):
        return f"`{','.join(map(str, field.default))}`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _kind(annotation: object) -> str:
    """What to write as the value."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "list"
    names = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
    return names[annotation] if isinstance(annotation, type) and annotation in names else "text"


def main(folder: Path) -> None:
    """Writes all pages."""
    for name, write in PAGES.items():
        (folder / name).write_text(write())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
