"""What a gateway serves: one model, and the road to it."""

from dataclasses import dataclass

from ..assistant.message_plans import MessagePlans
from ..health import MeshHealth
from ..mesh.mesh_view import MeshView
from ..mesh.tokenizer_client import TokenizerClient
from .generation import Generator


@dataclass(frozen=True, slots=True)
class Served:
    """The same for both edges."""

    model: str
    """Its name for clients."""
    plans: MessagePlans
    generator: Generator
    tokenizers: TokenizerClient
    mesh: MeshView
    health: MeshHealth
