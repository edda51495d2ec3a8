"""Finds out whether a request would be answered now, and otherwise which part of the mesh is missing."""

from tokenloom.v1 import types_pb2

from .mesh.mesh_view import MeshView
from .mesh.output_pool import OutputPool
from .mesh.tokenizer_client import TokenizerClient

PARTS = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
"""The parts that a request needs."""


class MeshHealth:
    """Looks at the parts that a request needs.

    Attributes:
        draining: Set when this gateway accepts no more requests.
    """

    def __init__(self, tokenizers: TokenizerClient, outputs: OutputPool, mesh: MeshView) -> None:
        self._tokenizers = tokenizers
        self._outputs = outputs
        self._mesh = mesh
        self.draining = False

    def limits(self) -> types_pb2.ModelLimits | None:
        """Return the limits of a request; None before the first engine is known."""
        info = self._tokenizers.info
        return self._mesh.limits(info.fingerprint) if info is not None else None

    def missing(self) -> list[str]:
        """Return the names of the missing parts; empty when none is missing."""
        info = self._tokenizers.info
        present = (
            not self.draining,
            self._tokenizers.healthy,
            self._outputs.healthy,
            self._mesh.connected,
            info is not None and any(self._mesh.serving(info.fingerprint)),
        )
        return [name for name, is_present in zip(PARTS, present, strict=True) if not is_present]
