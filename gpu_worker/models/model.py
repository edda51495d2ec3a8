"""Defines what the model runner needs of a model."""

from typing import Protocol

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.embedding import InputEmbeds


class Model(Protocol):
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
    ) -> Tensor:
        """Compute the last hidden states [T, hidden_size] of T tokens; ``input_ids`` and ``positions`` are int64 [T].

        Writes the tokens' keys and values to ``kv_caches`` (one per layer) where ``plan`` says. ``embeds``
        replace the embeddings of ``input_ids``. With fewer caches only the first layers are computed, which a profile
        of memory uses.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden_size] into float32 logits [R, vocab_size]."""
