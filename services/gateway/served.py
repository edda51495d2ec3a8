"""What a gateway serves: one model, and the road to it."""

from dataclasses import dataclass

from .generation import Generator
from .health import MeshHealth
from .mesh_view import MeshView
from .message_plans import MessagePlans
from .tokenizer_client import TokenizerClient


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
