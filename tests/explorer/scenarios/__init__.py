"""What is explored."""

from collections.abc import Callable
from typing import Final

from tests.explorer.world import Scenario

from .batches import BatchScenario, FileScenario, KeptBatchScenario
from .core_clients import CoreClientScenario
from .encoders import EncoderScenario
from .generations import GenerationScenario
from .hubs import HubScenario
from .meshes import MeshScenario
from .outputs import OutputScenario
from .pauses import PauseScenario
from .responses import ResponseScenario
from .rows import RowScenario
from .streams import StreamScenario

SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {
    "batches": BatchScenario,
    "kept batches": KeptBatchScenario,
    "files": FileScenario,
    "generations": GenerationScenario,
    "responses": ResponseScenario,
    "outputs": OutputScenario,
    "pauses": PauseScenario,
    "streams": StreamScenario,
    "hubs": HubScenario,
    "meshes": MeshScenario,
    "core clients": CoreClientScenario,
    "rows": RowScenario,
    "encoders": EncoderScenario,
}
