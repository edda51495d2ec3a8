"""Computes Llama and its relatives: embeddings, :mod:`.decoder_layers` one after the other, and the output layer."""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..attention.states import StatePlan
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.embedding import InputEmbeds, TokenTable, add_level, embed, load_ends, load_table
from ..layers.expert_routes import ExpertRoutes
from ..layers.linear import Linear
from ..layers.rotary import RotaryEmbedding
from ..ops.ops import Ops, Rotation
from ..parallel.ranks import Stage
from ..pooling.class_head import ClassHead, load_score_head
from .decoder_layers import AddNorm, DecoderLayer, PartLayer, PostNormLayer, add
from .experts import Experts
from .mixers import stored_rows, weight_scales
from .mlp import MLP
from .model import LanguageModel, replace_layers


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
        self._ops, self._tanh = ops, ops.rowwise(torch.tanh_)
        ropes = list(dict.fromkeys(config.ropes))
        log1p, axes = ops.rowwise(torch.log1p), () if config.media is None else config.media.axes
        self._rotaries = [RotaryEmbedding(rope, device, ops.rotation, log1p, axes) for rope in ropes]
        self._rotary_of_layer = [ropes.index(rope) for rope in config.ropes]
        experts = config.experts
        self.routes: ExpertRoutes | None = None
        if experts is not None and any(experts.layers):
            self.routes = ExpertRoutes(experts.count, experts.per_token, sum(experts.layers))
        self._lm_head: Linear | None = None
        self.head: ClassHead | None = None
        """The class head that stands in the place of an output layer; None: the model has that."""
        self._embedding_norm: Callable[[Tensor], Tensor] | None = None
        if config.traits.norms_embeddings:
            ones = torch.ones(config.hidden_size, dtype=config.dtype, device=device)
            self._embedding_norm = lambda rows: ops.add_norm(rows, None, ones, config.norm_eps)
        self._layers: list[DecoderLayer | PartLayer | PostNormLayer] = []
        self.kept_layers: tuple[int, ...] = ()
        """The layers whose inputs a step keeps for what drafts, in order; of all stages, which pass them on."""
        self.kept_states: Tensor | None = None
        """[T, layers * hidden_size]: those of the last step, on the last stage."""
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        config, ops = self.config, self._ops
        _name_tensors(checkpoint, config)
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        name, self._lm_head, self.head = "model.embed_tokens.weight", None, None
        if config.has_class_head or not config.has_output:
            self._embedding: TokenTable | None = load_table(checkpoint, name, config)
            if config.has_class_head:
                self.head = load_score_head(checkpoint, config.hidden_size)
        else:
            self._embedding, self._lm_head = load_ends(checkpoint, name, config, adapts=True)
        kind: type[DecoderLayer | PartLayer | PostNormLayer] = DecoderLayer
        if config.traits.has_single_parts:
            kind = PartLayer
        elif config.traits.norm_order != "before":
            kind = PostNormLayer

        def load(layer: int) -> DecoderLayer | PartLayer | PostNormLayer:
            made = kind(checkpoint, f"model.layers.{config.first_layer + layer}", config, ops, layer, self.routes)
            parts = made.parts if isinstance(made, DecoderLayer) else None
            return made if parts is None else ops.fused(made, parts)

        count = config.num_layers if config.mixer is None else len(config.mixer.layers)
        replace_layers(self._layers, count, load, checkpoint)
        self._norm = AddNorm(checkpoint, "model.norm", config, ops, shifts=config.traits.shifts_last_norm)
        # Older checkpoints stored the frequencies that the configuration determines.
        checkpoint.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))
        if config.mixer is not None:  # configurations of Qwen3-Next do not mention the head that drafts
            checkpoint.skip_below("mtp.")
            return
        for layer in range(config.num_further_layers):
            checkpoint.skip_below(f"model.layers.{config.num_layers + layer}.")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
        states: StatePlan | None = None,
    ) -> Tensor:
        if self._stage is None or self.config.first_layer == 0:
            residual = embed(self._embedding, input_ids, embeds, self.config.embedding_scale, self._embedding_norm)
        else:
            residual = self._stage.receive(len(input_ids), 1 + len(self._kept_before(0)))
        delta: Tensor | None = None
        rotations = [rotary(positions) for rotary in self._rotaries]
        if self.kept_layers:
            return self._forward_keeping(residual, rotations, kv_caches, plan, embeds)
        if self.config.mixer is not None:
            return self._leave(residual, self._mix_states(residual, rotations[0], kv_caches, plan, states))
        # Levels count from the model's first layer: a stage's own number would add them again in every stage.
        level = self.config.first_layer
        for layer, rotary, kv_cache in zip(self._layers, self._rotary_of_layer, kv_caches, strict=False):
            delta = layer(residual, delta, rotations[rotary], kv_cache, plan)
            if embeds:
                level += 1
                add_level(residual if delta is None else delta, embeds, level)
        return self._leave(residual, delta)

    def _forward_keeping(
        self,
        residual: Tensor,
        rotations: list[Rotation],
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds,
    ) -> Tensor:
        """Compute a step, and keep the inputs of some layers: the residual stream before each.

        ``residual``: from another stage, it holds the inputs of earlier layers behind the stream.
        """
        delta: Tensor | None = None
        size = self.config.hidden_size
        kept = [residual[:, begin : begin + size] for begin in range(size, residual.shape[1], size)]
        residual = residual[:, :size].contiguous()
        columns = zip(self._layers, self._rotary_of_layer, kv_caches, strict=False)
        for number, (layer, rotary, kv_cache) in enumerate(columns, self.config.first_layer):
            if number in self.kept_layers:  # copied: layers change the stream in place
                kept.append(residual.clone() if delta is None else residual + delta)
            delta = layer(residual, delta, rotations[rotary], kv_cache, plan)
            if embeds:
                add_level(residual if delta is None else delta, embeds, number + 1)
        # A profile computes fewer layers, and sends as many rows as a step.
        kept += [residual] * (len(self._kept_before(len(self._layers))) - len(kept))
        if self._stage is None or self.config.is_last_stage:
            self.kept_states = torch.cat(kept, -1)
            return self._leave(residual, delta)
        return self._stage.send(torch.cat([add(residual, delta), *kept], -1))

    def _kept_before(self, number: int) -> list[int]:
        """Return which of the kept layers are before a layer of this stage."""
        return [layer for layer in self.kept_layers if layer < self.config.first_layer + number]

    def _leave(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Return the last hidden states, or those that go to the stage behind."""
        if self._stage is None or self.config.is_last_stage:
            return self._norm(residual, delta)
        return self._stage.send(add(residual, delta))

    def _mix_states(
        self,
        residual: Tensor,
        rotation: Rotation,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        states: StatePlan | None,
    ) -> Tensor | None:
        """Compute the layers of a model of which some keep a state, up to the last one that has a KV cache, or all.
        ``states``: None if none is among this rank's."""
        assert self.config.mixer is not None
        delta, attended, is_whole = None, 0, len(kv_caches) >= self.config.num_layers
        is_beside = self.config.mixer.is_beside_attention
        for layer, kept in zip(self._layers, states.layers if states else repeat(None), strict=states is not None):
            assert not isinstance(layer, PostNormLayer)
            if is_beside:
                delta = layer(residual, delta, rotation, (kept, kv_caches[attended]), (states, plan))
            elif kept is not None or (isinstance(layer, PartLayer) and layer.mlp is not None):
                delta = layer(residual, delta, rotation, kept, states)
                continue
            else:
                delta = layer(residual, delta, rotation, kv_caches[attended], plan)
            attended += 1
            if attended == len(kv_caches) and not is_whole:
                break
        return delta

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens [T]."""
        return embed(self._embedding, input_ids, (), self.config.embedding_scale, self._embedding_norm)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:  # only warm-up asks, of a model with a class head or where none are computed
            return hidden.float()
        logits = self._lm_head(hidden, torch.float32)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        softcap = self.config.logit_softcap
        return logits if softcap is None else self._tanh(logits.div_(softcap)).mul_(softcap)


def _name_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Let the checkpoint find tensors that files of this family name or scale in another way."""
    checkpoint.stored_names, checkpoint.stored_rows = config.traits.stored_names, stored_rows(config)
    checkpoint.scales = weight_scales(config)


def relocate_experts(model: LanguageModel, checkpoint: Checkpoint, held: Sequence[Mapping[int, MLP]]) -> None:
    """Fill the places for experts that this rank has now. ``held``: what :meth:`Experts.held` of each layer was. Raises
    ``ValueError`` for a tensor that the checkpoint lacks."""
    _name_tensors(checkpoint, model.config)
    for layer, experts in zip(expert_layers(model), held, strict=True):
        layer.relocate(checkpoint, experts)
        checkpoint.drop_read()


def expert_layers(model: LanguageModel) -> list[Experts]:
    """Return the experts of each layer that has some, of a model of this class."""
    assert isinstance(model, DecoderModel), "no other model has experts on several ranks"
    return [layer.mlp for layer in model._layers if isinstance(layer.mlp, Experts)]
