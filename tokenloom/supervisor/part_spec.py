"""What a part is before it runs, and the error of one that does not start."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .state_dir import PartRecord


@dataclass(frozen=True)
class PartSpec:
    """Specifies one process of the mesh: its command and environment."""

    service: str
    """The module's name in `tokenloom.services`."""
    index: int
    command: tuple[str, ...]
    state_file: Path
    """File to which the process writes its id and its addresses when it listens."""
    role: str | None = None
    """Role of an engine: ``prefill``, ``decode`` or ``both``."""
    model: str = ""
    """The name of the model that it serves; empty for gateways, which serve all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the supervisor's; also for secrets, which lists of processes must not show."""
    withheld: frozenset[str] = frozenset()
    """Variables of the supervisor that this part must not get: secrets of other parts."""
    descriptors: tuple[int, ...] = ()
    """Descriptors of the supervisor that the process inherits under the same numbers: its listening sockets."""
    leftovers: tuple[Path, ...] = ()
    """Files of a killed predecessor to remove before each start."""
    first_flags: tuple[str, ...] = ()
    """More flags for its first process."""

    @property
    def name(self) -> str:
        """The name in logs: ``engine-0``."""
        return f"{self.service}-{self.index}"

    @property
    def first(self) -> "PartSpec":
        """The specification of its first process."""
        return replace(self, command=(*self.command, *self.first_flags))

    @property
    def record(self) -> PartRecord:
        return PartRecord(self.service, self.index, self.role, str(self.state_file), self.model)


class PartFailed(Exception):
    """A part cannot be started; the message says which one and how it ended."""
