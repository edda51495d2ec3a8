"""What is explored."""

from collections.abc import Callable
from typing import Final

from tests.explorer.world import Scenario

from .batches import BatchScenario, FileScenario
from .core_clients import CoreClientScenario
from .generations import GenerationScenario
from .responses import ResponseScenario

SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {
    "batches": BatchScenario,
    "files": FileScenario,
    "generations": GenerationScenario,
    "responses": ResponseScenario,
    "core clients": CoreClientScenario,
}
