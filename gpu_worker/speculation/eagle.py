"""Drafts with an EAGLE head: one layer that predicts the model's next hidden state from the state before a token and
the token itself (Li et al., "EAGLE: speculative sampling requires rethinking feature uncertainty"); with an EAGLE-3
head, which reads the states of several layers and has an output layer of its own; or with the head that the model's own
checkpoint brings (multi-token prediction).

The KV of a token lies in the token's own slot and depends on nothing after it, so cached blocks can be shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..batch.input_batch import Ints, StepInputs
from ..checkpoint.draft_config import Eagle3Entries, MtpNames
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..device.device_link import to_device
from ..kernels.compiler import KernelsUnavailable
from ..layers.expert_routes import ExpertRoutes
from ..layers.linear import load_linear, make_linear
from ..layers.rotary import RotaryEmbedding
from ..models.decoder_layers import AddNorm, Attention, DecoderLayer
from ..models.mixers import stored_rows
from ..models.mlp import MLP
from ..models.model import LanguageModel
from ..ops.ops import Ops
from .greedy_drafts import DraftRange, DraftWeights, GreedyDrafts, StateAddresses, fits


@runtime_checkable
class EmbedsTokens(Protocol):
    """A model whose embeddings and output layer a head uses."""

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens [T]."""

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


@runtime_checkable
class KeepsStates(EmbedsTokens, Protocol):
    """A model that keeps the inputs of some layers."""

    kept_layers: tuple[int, ...]
    kept_states: Tensor | None


def load_greedy_head(
    path: Path, config: ModelConfig, target: LanguageModel, device: torch.device
) -> GreedyDrafts | None:
    """Load the weights of a head, and those of ``target``, for :class:`GreedyDrafts`. None: the head computes every
    draft."""
    plain = target.config.logit_softcap is None and target.config.quantization is None
    if device.type != "cpu" or not (plain and fits(config, is_head=True)) or not isinstance(target, EmbedsTokens):
        return None
    try:
        with torch.inference_mode(), Checkpoint(path, config.dtype, device, config.scheme) as checkpoint:
            embedding = target.embed_tokens(torch.arange(config.vocab_size))
            # Of a unit vector the logits are a column of the matrix.
            output = target.compute_logits(torch.eye(config.hidden_size, dtype=config.dtype)).t()
            return GreedyDrafts(DraftWeights.of_head(checkpoint, config, embedding, output))
    except KernelsUnavailable:
        return None


class EagleHead:
    """Fulfils :class:`~.drafter.Drafter`."""

    keeps_drafts = False  # it is computed anew from the model's own hidden states

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        ops: Ops,
        device: torch.device,
        target: Callable[[], EmbedsTokens],
        at_once: GreedyDrafts | None = None,
    ) -> None:
        """``target`` returns the model that the head drafts for, which sleep replaces."""
        self._begin(checkpoint, "fc", config, target, at_once)
        self._attention = Attention(checkpoint, "layers.0.self_attn", config, ops, 0)
        self._norm = AddNorm(checkpoint, "layers.0.post_attention_layernorm", config, ops)
        self._mlp = MLP(checkpoint, "layers.0.mlp", config, ops)
        self._rotary = RotaryEmbedding(config.ropes[0], device, ops.rotation)
        checkpoint.skip(["embed_tokens.weight"])  # the model's own is used

    def _begin(
        self,
        checkpoint: Checkpoint,
        fc: str,
        config: ModelConfig,
        target: Callable[[], EmbedsTokens],
        at_once: GreedyDrafts | None = None,
    ) -> None:
        """Load what joins a token and the state before it, and set what all heads have."""
        size = config.hidden_size
        self.at_once, self._target = at_once, target
        self._fc = load_linear(checkpoint, [fc], 2 * size, [size], False, config.quantization)
        self._before: dict[str, Tensor] = {}
        """[hidden_size]: the state of the last token that the model has computed, by request."""

    def states(self, step: StepInputs, hidden: Tensor, places: Ints, inputs: StepInputs) -> Tensor:
        """Return for each token of ``inputs`` the model's state of the token before it, [T, hidden_size].

        Zeros stand for a state that the model did not compute here: that before a prompt, or before the rest of a
        prompt whose beginning was cached.
        """
        lengths = np.diff(inputs.cu_query_lens)
        first_rows = np.repeat(step.cu_query_lens[places], lengths)
        before = inputs.positions - step.positions[first_rows] + first_rows - 1
        is_older = before < first_rows
        states = hidden[to_device(np.where(is_older, 0, before).astype(np.int64), hidden.device)]
        for row in np.flatnonzero(is_older).tolist():
            req_id = inputs.req_ids[int(np.searchsorted(inputs.cu_query_lens, row, side="right")) - 1]
            states[row] = self._before.get(req_id, 0.0)
        return states

    def state_addresses(
        self, step: StepInputs, hidden: Tensor, places: Sequence[int], ranges: Sequence[DraftRange]
    ) -> list[StateAddresses]:
        found, at, row_bytes = [], hidden.data_ptr(), hidden.stride(0) * hidden.itemsize
        for place, (_, start, _, _) in zip(places, ranges, strict=True):
            first_row = step.cu_query_lens.item(place)
            first = step.positions.item(first_row)
            states_at = at + (first_row + start - first) * row_bytes
            if start > first:
                found.append((states_at - row_bytes, states_at))
            else:
                before = self._before.get(step.req_ids[place])
                found.append((0 if before is None else before.data_ptr(), states_at))
        return found

    @torch.inference_mode()
    def keep(self, step: StepInputs, hidden: Tensor, places: Sequence[int], computed: Sequence[int]) -> None:
        first_rows = step.cu_query_lens[places]
        rows = first_rows + np.array(computed) - 1 - step.positions[first_rows]
        states = hidden[to_device(rows, hidden.device)]
        self._before.update(zip([step.req_ids[place] for place in places], states, strict=True))

    def forget(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            self._before.pop(req_id, None)

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor | None, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor:
        assert states is not None
        size = states.shape[1]
        joined = torch.empty(len(states), 2 * size, dtype=states.dtype, device=states.device)
        joined[:, :size] = self._target().embed_tokens(input_ids)
        joined[:, size:] = states
        residual = self._fc(joined)
        delta = self._attention(residual, self._rotary(positions), kv_caches[0], plan)
        normed = self._norm(residual, delta)
        return residual.add_(self._mlp(normed))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._target().compute_logits(hidden)


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the configuration of the layer of a whole model's own head."""
    experts = None if target.experts is None else replace(target.experts, layers=(True,))
    return replace(
        target,
        num_layers=1,
        ropes=target.ropes[:1],
        attention_scales=target.attention_scales[:1],
        sliding_windows=(None,),
        experts=experts,
        mixer=None,
        states=None,
        num_further_layers=0,
    )


class MtpHead(EagleHead):
    """Drafts with the head that a checkpoint brings: a layer with attention between norms, which predicts the token
    after next. Each further draft takes the head's own state in the place of the model's."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        names: MtpNames,
        ops: Ops,
        device: torch.device,
        target: Callable[[], EmbedsTokens],
    ) -> None:
        """``config``: that of :func:`mtp_config`; ``target`` as in :class:`EagleHead`."""
        checkpoint.stored_rows = stored_rows(config)
        self._begin(checkpoint, names.joins, config, target)
        self._of_token, self._of_state, self._norm = (
            AddNorm(checkpoint, name, config, ops) for name in (names.of_token, names.of_state, names.norm)
        )
        self._keeps_normed = names.keeps_normed
        routes = None if config.experts is None else ExpertRoutes(config.experts.count, config.experts.per_token, 1)
        self._layer = DecoderLayer(checkpoint, names.layer, config, ops, 0, routes)
        axes = () if config.media is None else config.media.axes
        self._rotary = RotaryEmbedding(config.ropes[0], device, ops.rotation, ops.rowwise(torch.log1p), axes)

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor | None, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor:
        assert states is not None
        size = states.shape[1]
        joined = torch.empty(len(states), 2 * size, dtype=states.dtype, device=states.device)
        joined[:, :size] = self._of_token(self._target().embed_tokens(input_ids), None)
        joined[:, size:] = self._of_state(states, None)
        residual = self._fc(joined)
        delta = self._layer(residual, None, self._rotary(positions), kv_caches[0], plan)
        return self._norm(residual, delta) if self._keeps_normed else residual.add_(delta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden if self._keeps_normed else self._norm(hidden, None))


class Eagle3Head(EagleHead):
    """Drafts from the states of several layers (Li et al., "EAGLE-3: scaling up inference acceleration of large
    language models via training-time test"). Each further draft takes the head's own state in their place."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Eagle3Entries,
        layers: tuple[int, ...],
        ops: Ops,
        device: torch.device,
        target: Callable[[], KeepsStates],
    ) -> None:
        """``layers``: those of the model whose inputs the head reads; ``target`` as in :class:`EagleHead`. Raises
        ``ValueError`` if the files do not fit ``entries``."""
        config = entries.config
        size, self._vocab_size = config.hidden_size, config.vocab_size
        self.at_once, self._target, self._before = None, target, {}
        self._keeper = target
        target().kept_layers = layers
        self._norms_residual = entries.norms_residual
        self._fc = load_linear(checkpoint, ["fc"], len(layers) * size, [size], False, config.quantization)
        # The name that the authors' files have, and that of vLLM's.
        layer = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
        self._of_token, self._of_state, self._norm = (
            AddNorm(checkpoint, f"{layer}.{name}", config, ops)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        self._attention = Attention(checkpoint, f"{layer}.self_attn", config, ops, 0, 2 * size)
        self._mlp = MLP(checkpoint, f"{layer}.mlp", config, ops)
        self._rotary = RotaryEmbedding(config.ropes[0], device, ops.rotation)
        self._last_norm = AddNorm(checkpoint, "norm", config, ops)
        self._output = make_linear(checkpoint.take("lm_head.weight", entries.num_outputs, size))
        self._tokens = _drafted_tokens(checkpoint, entries).to(device)
        checkpoint.skip(["embed_tokens.weight", "t2d"])  # the model's own, and the inverse of what was read

    def states(self, step: StepInputs, hidden: Tensor, places: Ints, inputs: StepInputs) -> Tensor:
        return super().states(step, self._kept(), places, inputs)

    def keep(self, step: StepInputs, hidden: Tensor, places: Sequence[int], computed: Sequence[int]) -> None:
        super().keep(step, self._kept(), places, computed)

    def _kept(self) -> Tensor:
        kept = self._keeper().kept_states
        assert kept is not None, "the model has computed a step"
        return kept

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor | None, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor:
        assert states is not None
        embeddings = self._target().embed_tokens(input_ids)
        size = embeddings.shape[1]
        residual = states if states.shape[1] == size else self._fc(states)
        joined = torch.empty(len(states), 2 * size, dtype=states.dtype, device=states.device)
        joined[:, :size] = self._of_token(embeddings, None)
        joined[:, size:] = normed = self._of_state(residual, None)
        residual = normed if self._norms_residual else residual
        delta = self._attention(joined, self._rotary(positions), kv_caches[0], plan)
        return residual.add_(self._mlp(self._norm(residual, delta)))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        own = self._output(self._last_norm(hidden, None), torch.float32)
        logits = own.new_full((len(own), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._tokens, own)


def _drafted_tokens(checkpoint: Checkpoint, entries: Eagle3Entries) -> Tensor:
    """Return the token of each output of an EAGLE-3 head, [num_outputs] int64."""
    outputs = torch.arange(entries.num_outputs)
    if "d2t" not in checkpoint and entries.num_outputs == entries.config.vocab_size:
        return outputs
    tokens = outputs + checkpoint.take_integers("d2t", entries.num_outputs)
    is_within = 0 <= int(tokens.min()) <= int(tokens.max()) < entries.config.vocab_size
    if not is_within or len({*tokens.tolist()}) < len(tokens):
        raise ValueError(f"d2t: its outputs must be different tokens below {entries.config.vocab_size}")
    return tokens
