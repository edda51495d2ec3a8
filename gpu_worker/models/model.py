"""Defines what the model runner needs of a model."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from tokenloom.process.memory import return_freed

from ..attention.attention_backend import AttentionPlan, KVCache
from ..attention.states import StatePlan
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.embedding import InputEmbeds
from ..layers.expert_routes import ExpertRoutes, Ints
from ..layers.weight_memory import keep_on_host


class LanguageModel(Protocol):
    """Holds a decoder-only language model with its weights."""

    @property
    def config(self) -> ModelConfig: ...

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Replace all weights with those of a checkpoint of the same configuration, one part after the other.

        Each old part is dropped before its successor is loaded, so both copies are never in memory. After an exception
        the model is of no use. Raises ``ValueError`` if a tensor is absent or has another shape.
        """

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
        states: StatePlan | None = None,
    ) -> Tensor:
        """Compute the last hidden states [T, hidden_size] of T tokens; ``input_ids`` and ``positions`` are int64 [T].

        Writes the tokens' keys and values to ``kv_caches`` (one per layer) where ``plan`` says. ``embeds``
        replace the embeddings of ``input_ids``. ``states``: the slots of the layers that keep a state; None: none
        does. With fewer caches only the first layers are computed, which a profile of memory uses.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden_size] into float32 logits [R, vocab_size]."""


@runtime_checkable
class RoutedModel(LanguageModel, Protocol):
    """A model of a class that may have experts."""

    routes: ExpertRoutes | None


def expert_counts(model: LanguageModel) -> Ints:
    """Return the tokens that each expert of a model with experts computed, [num_layers, num_experts]."""
    routes = routes_of(model)
    assert routes is not None, "the model has no experts"
    return routes.counts()


def routes_of(model: LanguageModel) -> ExpertRoutes | None:
    """Return what records the choices of a model's routers; None if it has no experts."""
    return model.routes if isinstance(model, RoutedModel) else None


class StepModel(Protocol):
    """Computes steps that may be recorded, as :class:`LanguageModel` does."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


Layer = TypeVar("Layer")


def replace_layers(layers: list[Layer], count: int, load: Callable[[int], Layer], checkpoint: Checkpoint) -> None:
    """Load ``count`` layers of a checkpoint into ``layers``; each old one is dropped before its successor is loaded."""
    for number in range(count):
        if len(layers) == count:
            del layers[0]
            return_freed()  # otherwise the next tensors would not fit into the pieces that the allocator keeps
        layers.append(load(number))
        if checkpoint.host_room:
            checkpoint.host_room -= keep_on_host(layers[-1], checkpoint.host_room)
