"""What a part is, before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .state_dir import PartRecord


@dataclass(frozen=True)
class PartSpec:
    """One process of the mesh: a service's module, its flags and what it may use."""

    service: str
    """The module's name in `tokenloom.services`."""
    index: int
    command: tuple[str, ...]
    state_file: Path
    """Where the process writes its id and its addresses once it is bound."""
    role: str | None = None
    """Of an engine: ``prefill``, ``decode`` or ``both``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own; also for what must not show in a list of processes."""
    cpus: tuple[int, ...] = ()
    """Cores to be bound to; empty: any."""
    leftovers: tuple[Path, ...] = ()
    """Files that a killed predecessor may have left and that are removed before each start."""

    @property
    def name(self) -> str:
        """``engine-0``: how logs call it."""
        return f"{self.service}-{self.index}"

    @property
    def record(self) -> PartRecord:
        return PartRecord(self.service, self.index, self.role, str(self.state_file))
