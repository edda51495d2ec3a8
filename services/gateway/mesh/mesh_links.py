"""Joins the links to the parts of a mesh that a request needs."""

from dataclasses import dataclass

from tokenloom.request.errors import Unavailable
from tokenloom.v1 import types_pb2

from .mesh_view import MeshView
from .output_pool import OutputPool
from .tokenizer_client import TokenizerClient


@dataclass(frozen=True, slots=True)
class MeshLinks:
    """Holds the links of one mesh: to its tokenizers, its coordinator and its output processors."""

    tokenizers: TokenizerClient
    view: MeshView
    outputs: OutputPool

    def limits(self) -> types_pb2.ModelLimits:
        """Return the limits of the model. Raises ``Unavailable`` before the first engine serves."""
        info = self.tokenizers.info
        limits = self.view.limits(info.fingerprint) if info is not None else None
        if limits is None:
            raise Unavailable("no engine is serving yet; retry")
        return limits
