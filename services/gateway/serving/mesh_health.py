"""Finds out whether a request would be answered now, and which parts of the mesh are missing or degraded."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from tokenloom.process.fall_backs import FallBack, FallBacks
from tokenloom.services.runtime.host.health import Health
from tokenloom.v1 import types_pb2

from ..mesh.mesh_view import MeshView
from ..mesh.output_pool import OutputPool
from ..mesh.tokenizer_client import TokenizerClient

PARTS = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
"""The parts of every mesh."""
ENCODER = "encoder"
"""The part that a mesh has, too, whose model reads images or sounds."""
PUBLISH_SECONDS = 0.25
"""How often gRPC health follows the state of the mesh."""


@dataclass(frozen=True, slots=True)
class PartState:
    """Counts the replicas of one part, as this gateway sees them.

    Attributes:
        num_serving: Replicas that answer.
        num_known: Replicas that should answer.
        is_needed: Whether requests fail without any replica. They do not need the coordinator once engines are known.
        may_be_away: Whether having no replica is no fault: requests wait, and an autoscaler starts one for them.
    """

    num_serving: int
    num_known: int
    is_needed: bool = True
    may_be_away: bool = False

    @property
    def state(self) -> Literal["ok", "degraded", "missing"]:
        """Return ``missing`` if no replica answers, ``degraded`` if only some do."""
        if not self.num_serving:
            return "missing"
        return "ok" if self.num_serving >= self.num_known else "degraded"


class MeshHealth:
    """Looks at the parts that a request needs.

    Attributes:
        draining: Set when this gateway accepts no more requests.
    """

    def __init__(
        self,
        tokenizers: TokenizerClient,
        outputs: OutputPool,
        mesh: MeshView,
        fall_backs: FallBacks,
        *,
        needs_engines: bool = True,
    ) -> None:
        """``fall_backs``: those of this gateway. ``needs_engines``: False where engines are scaled to zero."""
        self._tokenizers = tokenizers
        self._outputs = outputs
        self._mesh = mesh
        self._fall_backs = fall_backs
        self._needs_engines = needs_engines
        self.draining = False

    def limits(self) -> types_pb2.ModelLimits | None:
        """Return the limits of a request; None before the first engine is known."""
        return self._mesh.limits

    def parts(self) -> Mapping[str, PartState]:
        """Return the state of every part, by its name in :data:`PARTS`, and that of :data:`ENCODER`, if any is
        needed."""
        info = self._tokenizers.info
        engines = self._mesh.count_engines(info.fingerprint) if info is not None else (0, 0)
        parts = {
            "gateway": PartState(int(not self.draining), 1),
            "tokenizer": PartState(self._tokenizers.num_alive, self._tokenizers.num_known),
            "output_processor": PartState(self._outputs.num_connected, self._outputs.num_known),
            # /health was 503 without a coordinator before, although requests were answered by its last snapshot.
            "coordinator": PartState(int(self._mesh.connected), 1, is_needed=False),
            "engine": PartState(*engines, is_needed=self._needs_engines, may_be_away=not self._needs_engines),
        }
        limits = self._mesh.limits
        transcribes = info is not None and info.HasField("transcript")
        reads_media = info is not None and (info.media_kinds or transcribes)
        # Engines with --language-model-only read text, whatever the tokenizer could.
        if reads_media and (limits is None or limits.media_kinds):
            num_serving, num_known = self._mesh.count_encoders()
            # At least one is missing if there never was any. Requests of text are answered without, and a model that
            # transcribes has no others.
            parts[ENCODER] = PartState(num_serving, max(num_known, 1), is_needed=transcribes)
        return parts

    def fall_backs(self) -> list[FallBack]:
        """Return what this gateway and the engines do without; the subjects of the latter are the engines."""
        return self._fall_backs.active + [
            FallBack(each.kind, entry.identity.engine_id, each.detail)
            for entry in self._mesh.engines
            for each in entry.report.fall_backs
        ]

    def missing(self) -> list[str]:
        """Return the parts without which requests are not answered now; empty when requests are answered."""
        return [name for name, part in self.parts().items() if part.is_needed and not part.num_serving]

    async def publish(self, health: Health) -> NoReturn:
        """Make gRPC health follow whether requests are answered, until cancelled."""
        while True:
            await health.set_answering(not self.missing())
            await asyncio.sleep(PUBLISH_SECONDS)
