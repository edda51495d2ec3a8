"""What is explored."""

from collections.abc import Callable
from typing import Final

from tests.explorer.world import Scenario

from .batches import BatchScenario, FileScenario
from .core_clients import CoreClientScenario
from .generations import GenerationScenario
from .hubs import HubScenario
from .outputs import OutputScenario
from .pauses import PauseScenario
from .responses import ResponseScenario
from .streams import StreamScenario

SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {
    "batches": BatchScenario,
    "files": FileScenario,
    "generations": GenerationScenario,
    "responses": ResponseScenario,
    "outputs": OutputScenario,
    "pauses": PauseScenario,
    "streams": StreamScenario,
    "hubs": HubScenario,
    "core clients": CoreClientScenario,
}
