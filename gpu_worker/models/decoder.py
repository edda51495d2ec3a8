"""Computes Llama and its relatives; ``DecoderTraits`` and :class:`ModelConfig` hold the differences."""

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.embedding import InputEmbeds, embed, load_embeddings
from ..layers.expert_routes import ExpertRoutes
from ..layers.linear import Linear, make_output
from ..layers.rotary import RotaryEmbedding
from ..ops.ops import Ops
from ..parallel.pipeline import Stage
from ..pooling.class_head import ClassHead, load_score_head
from .decoder_layers import AddNorm, DecoderLayer, PostNormLayer, add
from .experts import Experts
from .model import LanguageModel


class DecoderModel:
    """Computes the whole model (see :class:`~.model.LanguageModel`)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        ops: Ops,
        device: torch.device,
        stage: Stage | None = None,
    ) -> None:
        """``stage`` joins the layers to those of other stages; None: they are all layers of the model."""
        self.config = config
        self._stage = stage
        self._ops = ops
        ropes = list(dict.fromkeys(config.ropes))
        self._rotaries = [RotaryEmbedding(rope, device, ops.rotation) for rope in ropes]
        self._rotary_of_layer = [ropes.index(rope) for rope in config.ropes]
        experts = config.experts
        self.routes: ExpertRoutes | None = None
        if experts is not None and any(experts.layers):
            self.routes = ExpertRoutes(experts.count, experts.per_token, sum(experts.layers))
        self._lm_head: Linear | None = None
        self.head: ClassHead | None = None
        """The class head that stands in the place of an output layer; None: the model has that."""
        self._layers: list[DecoderLayer | PostNormLayer] = []
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        config, ops = self.config, self._ops
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        name, self._lm_head, self.head = "model.embed_tokens.weight", None, None
        if config.has_class_head:
            self._embedding = checkpoint.take(name, config.vocab_size, config.hidden_size)
            self.head = load_score_head(checkpoint, config.hidden_size)
        else:
            self._embedding, output = load_embeddings(checkpoint, name, config)
            if config.samples:
                self._lm_head = make_output(output, config.quantization)
        kind = DecoderLayer if config.traits.norm_order == "before" else PostNormLayer
        for layer in range(config.num_layers):
            if len(self._layers) == config.num_layers:
                del self._layers[0]
                checkpoint.return_dropped()
            prefix = f"model.layers.{config.first_layer + layer}"
            self._layers.append(kind(checkpoint, prefix, config, ops, layer, self.routes))
        self._norm = AddNorm(checkpoint, "model.norm", config, ops)
        # Older checkpoints stored the frequencies that the configuration determines.
        checkpoint.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
    ) -> Tensor:
        if self._stage is None or self.config.first_layer == 0:
            residual = embed(self._embedding, input_ids, embeds, self.config.embedding_scale)
        else:
            residual = self._stage.receive(len(input_ids))
        delta: Tensor | None = None
        rotations = [rotary(positions) for rotary in self._rotaries]
        for layer, rotary, kv_cache in zip(self._layers, self._rotary_of_layer, kv_caches, strict=False):
            delta = layer(residual, delta, rotations[rotary], kv_cache, plan)
        if self._stage is None or self.config.is_last_stage:
            return self._norm(residual, delta)
        return self._stage.send(add(residual, delta))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens [T]."""
        return embed(self._embedding, input_ids, (), self.config.embedding_scale)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:  # only warm-up asks for logits of a model with a class head, or where none are drawn
            return hidden.float()
        logits = self._lm_head(hidden, torch.float32)
        softcap = self.config.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def expert_layers(model: LanguageModel) -> list[Experts]:
    """Return the experts of each layer that has some, of a model of this class."""
    assert isinstance(model, DecoderModel), "no other model has experts on several ranks"
    return [layer.mlp for layer in model._layers if isinstance(layer.mlp, Experts)]
