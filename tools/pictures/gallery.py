"""Lists the pictures of the documentation."""

from collections.abc import Callable
from typing import Protocol

from . import benchmarks, failures, kv_transfer, mesh, request_life, scheduler_step


class Picture(Protocol):
    """Describes what is drawn."""

    def svg(self) -> str:
        """Return the file's text."""


PICTURES: dict[str, Callable[[], Picture]] = {
    "mesh": mesh.draw,
    "request": request_life.draw,
    "kv-transfer": kv_transfer.draw,
    "failures": failures.draw,
    "step": scheduler_step.draw,
    "engines-amx": benchmarks.engines_with_amx,
    "engines-avx512": benchmarks.engines_with_avx512,
    "mesh-cost": benchmarks.cost_of_the_mesh,
}
"""File name in ``docs/pictures``, without its suffix, and what draws it."""
