"""Describes a run of ``bench overload``, and holds what its phases have measured."""

from dataclasses import dataclass, field

from ..load.open_loop import Volley


@dataclass(frozen=True)
class OverloadCase:
    """Describes one run."""

    seconds: float = 180.0
    """How long the overload lasts."""
    times: float = 10.0
    """The overload, as a multiple of the peak."""
    peak_seconds: float = 30.0
    """How long the mesh runs at its peak before."""
    recovery_seconds: float = 15.0
    """How long it runs at half of its peak afterwards."""
    step_ms: float = 20.0
    batch: int = 64
    output_len: int = 64
    """Mean tokens of an answer."""
    max_queue_seconds: float = 0.5
    """The gateway's setting."""
    hogs: int = 0
    """Processes that take all the CPU they get during the overload."""
    seed: int = 0

    @property
    def peak_rate(self) -> float:
        """Requests per second that the engine completes."""
        return self.batch / (self.output_len * self.step_ms / 1e3)


@dataclass
class Phase:
    """Holds what one phase of a run has measured."""

    name: str
    rate: float
    volley: Volley
    cpu: dict[str, float]
    """Cores by service."""
    client_cores: float
    resident: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """MiB by service, with the seconds since the beginning of the phase."""


@dataclass
class Phases:
    """Holds the phases of a run, and the parts that were reported missing in any of them."""

    peak: Phase
    overload: Phase
    recovery: Phase
    missing: list[str]
