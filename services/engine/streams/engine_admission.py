"""Whether the engine takes another request now."""

from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.v1 import engine_pb2

from ..coordinator_link import CoordinatorLink
from ..load import LoadTracker


class Admission:
    """Bounds what is accepted, and refuses all of it once the engine drains."""

    def __init__(self, load: LoadTracker, coordinator: CoordinatorLink | None, *, max_live: int) -> None:
        """``max_live``: accepted requests at most, waiting ones included."""
        self._load = load
        self._coordinator = coordinator
        self._max_live = max_live
        self._refusal = ""

    def refuse_new(self, reason: str) -> None:
        """From now on every new request is answered UNAVAILABLE with ``reason``."""
        self._refusal = reason

    def admit(self, add: engine_pb2.AddRequest) -> None:
        """Raises ``Unavailable`` or ``ResourceExhausted``. The coordinator learns in any case that its pick arrived."""
        if self._coordinator is not None and add.HasField("pick"):
            self._coordinator.pick_arrived(add.pick)
        if self._refusal:
            raise Unavailable(self._refusal)
        if self._load.num_live >= self._max_live:
            raise ResourceExhausted(f"the engine has {self._load.num_live} requests, which is all it takes")
