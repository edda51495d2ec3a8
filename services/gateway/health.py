"""Whether a request would be answered, and if not, which part is missing."""

from tokenloom.v1 import types_pb2

from .mesh.mesh_view import MeshView
from .mesh.output_pool import OutputPool
from .mesh.tokenizer_client import TokenizerClient

PARTS = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
"""What a request needs."""


class MeshHealth:
    """The parts that a request needs."""

    def __init__(self, tokenizers: TokenizerClient, outputs: OutputPool, mesh: MeshView) -> None:
        self._tokenizers = tokenizers
        self._outputs = outputs
        self._mesh = mesh
        self.draining = False

    def limits(self) -> types_pb2.ModelLimits | None:
        """What a request may ask for; None before the first engine."""
        info = self._tokenizers.info
        return self._mesh.limits(info.fingerprint) if info is not None else None

    def missing(self) -> list[str]:
        """Names of the parts that are not there; empty when all are."""
        info = self._tokenizers.info
        serving = info is not None and any(self._mesh.serving(info.fingerprint))
        there = (
            not self.draining,
            self._tokenizers.healthy,
            self._outputs.healthy,
            self._mesh.connected,
            serving,
        )
        return [name for name, is_there in zip(PARTS, there, strict=True) if not is_there]
