"""Computes any causal language model of transformers over paged attention, with the tokens of a step in one row."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tokenloom.gguf.gguf_file import is_gguf

from ...attention.attention_backend import AttentionPlan, KVCache
from ...attention.states import StatePlan
from ...checkpoint.files.config_reader import read_media
from ...checkpoint.files.text_part import MediaSwitches
from ...checkpoint.gguf.config import described_by
from ...checkpoint.model_config import DtypeName, ModelConfig, as_torch
from ...checkpoint.weights import Checkpoint
from ...device.memory import return_freed
from ...layers.embedding import InputEmbeds
from ...layers.expert_routes import ExpertRoutes
from ...ops.ops import Ops
from .declared import complete, declared_config, fix_ropes, max_model_len
from .experts import routes_of_modules
from .loading import CausalClass, find_causal_class, load_modules, make_on_meta
from .modules import Head
from .paged_attention import NUM_PROBED, SERVING, EnoughLayers, LayerRule, PagedAttention, UnservableModel, bind, record
from .states import LayersWithStates, keeps_states


@dataclass(frozen=True)
class _Parts:
    """Holds one loaded checkpoint."""

    model: Any
    body: Any
    """The part of ``model`` that computes hidden states."""
    head: Head
    attention: PagedAttention
    states: LayersWithStates | None
    """Computes the layers that keep a state between tokens; None: there are none."""


class TransformersModel:
    """Fulfils :class:`~..model.LanguageModel` with transformers' modules.

    Its layers are those that transformers calls in turn; the n-th call of attention uses the n-th cache.
    """

    # The checkpoints in use have more than a hundred architectures, and each built-in one is code to keep. Here a new
    # release of transformers adds some without a change; a Llama takes 1.08 (32 requests) to 1.29 times (one) the CPU
    # of ours.
    config: ModelConfig
    routes: ExpertRoutes | None
    declared: ModelConfig
    architecture: str
    library = f"transformers-{transformers.__version__}"

    def __init__(
        self,
        path: Path,
        dtype: DtypeName,
        device: torch.device,
        ops: Ops,
        quantization: str | None,
        max_model_len: int | None = None,
    ) -> None:
        """Load the checkpoint directory ``path``; ``max_model_len`` is that of the engine's options. Raises
        ``ValueError`` naming what cannot be served, and why."""
        self._dtype_name, self._dtype, self._device = dtype, as_torch(dtype), device
        self._ops = ops
        self._quantization = quantization
        self._wanted_length = max_model_len
        self._parts = self._load(path)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        del self._parts  # frees its memory before the new one is loaded
        return_freed()
        self._parts = self._load(checkpoint.path)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
        states: StatePlan | None = None,
    ) -> Tensor:
        parts = self._parts
        inputs: dict[str, Tensor] = {"input_ids": input_ids[None]}
        if embeds:
            inputs = _embed(parts, input_ids, embeds)
        parts.attention.begin(plan, kv_caches)
        if parts.states is not None and states is not None:
            parts.states.begin(states)
        try:
            output = parts.body(**inputs, position_ids=positions[None], use_cache=False)
        except EnoughLayers:
            return torch.zeros(len(input_ids), self.config.hidden_size, dtype=self._dtype, device=self._device)
        finally:
            parts.attention.end()
            if parts.states is not None:
                parts.states.end()
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._parts.head(hidden)

    @torch.inference_mode()
    def compute_eagerly(self, input_ids: Tensor, positions: Tensor | None = None, attention: str = "eager") -> Tensor:
        """Compute the logits [T, vocab_size] of one sequence [T] in one pass, with transformers' own attention.

        ``positions`` [T]: None leaves their numbering to the model. ``attention``: as transformers names it.
        """
        model = self._parts.model
        numbered = {} if positions is None else {"position_ids": positions[None]}
        model.set_attn_implementation(attention)
        try:
            logits: Tensor = model(input_ids=input_ids[None], use_cache=False, **numbered).logits[0]
        finally:
            model.set_attn_implementation(SERVING)
        return logits.float()

    @property
    def num_attention_calls(self) -> int:
        """How often the last forward pass attended."""
        return self._parts.attention.num_calls

    @torch.inference_mode()
    def _load(self, path: Path) -> _Parts:
        found = find_causal_class(path)
        self.architecture = found.architecture
        model = load_modules(found, path, self._dtype, self._device, self._ops, self._quantization)
        try:
            return self._take(found, model, None if is_gguf(path) else read_media(path))
        except Exception as error:  # a module may fail in any way
            reason = str(error) if isinstance(error, UnservableModel) else f"fails ({type(error).__name__}: {error})"
            raise ValueError(f"{described_by(path)}: {found.architecture} is not supported: it {reason}") from error

    def _take(self, found: CausalClass, model: Any, media: MediaSwitches | None) -> _Parts:
        body_name = _body_name(model)
        body = getattr(model, body_name)
        wanted = self._wanted_length
        declared = declared_config(found.config, self._dtype_name, self._quantization, wanted)
        declared = self.declared = dataclasses.replace(declared, scheme=found.scheme, media=media)
        if declared.max_model_len > max_model_len(found.config):
            length = min(wanted or 0, declared.max_model_len)
            fix_ropes(model, length)
            self.library = f"{type(self).library}-rope-{length}"
        states = None
        if keeps_states(found.config):
            states = LayersWithStates(body, found.config, self._dtype, self._device)
        elif getattr(model, "_is_stateful", False):
            raise UnservableModel("keeps a state that transformers' cache does not hold")
        rules = record(body, model, declared.max_model_len, self._device)
        self.routes = routes_of_modules(body, NUM_PROBED)
        layout = None if states is None else states.layout
        self._set_config(complete(declared, found.config.get_text_config(decoder=True), rules, layout))
        sizes = [shape.head_size for shape in self.config.kv_shapes] or [self.config.head_size] * len(rules)
        attention = PagedAttention(self._showing_images(rules), sizes)
        bind(model, attention)
        model.set_attn_implementation(SERVING)
        try:
            head = Head(model, body_name, declared.hidden_size, self._device, self._dtype)
        except EnoughLayers:
            raise UnservableModel("computes logits from a part that is inside another one") from None
        return _Parts(model, body, head, attention, states)

    def _showing_images(self, rules: list[LayerRule]) -> list[LayerRule]:
        """Return the rules with what images change in a layer, which a pass over text does not show."""
        return [
            dataclasses.replace(rule, scores=dataclasses.replace(rule.scores, sees_images=True))
            if self.config.shows_whole_images(layer)
            else rule
            for layer, rule in enumerate(rules)
        ]

    def _set_config(self, config: ModelConfig) -> None:
        """Keep what the first checkpoint showed. Raises :class:`UnservableModel` if another one differs."""
        for field in dataclasses.fields(ModelConfig) if hasattr(self, "config") else ():
            old, new = getattr(self.config, field.name), getattr(config, field.name)
            if old != new:
                raise UnservableModel(f"has {field.name} {new}, and the loaded checkpoint {old}")
        self.config = config


def _embed(parts: _Parts, input_ids: Tensor, embeds: InputEmbeds) -> dict[str, Tensor]:
    """Return what stands for ids: the model's embeddings [1, T, hidden_size], except where ``embeds`` gives others."""
    hidden: Tensor = parts.model.get_input_embeddings()(input_ids)
    for start, rows in embeds:
        hidden[start : start + len(rows)] = rows
    inputs = {"inputs_embeds": hidden[None]}
    if getattr(parts.body, "hidden_size_per_layer_input", 0):
        # Without them Gemma 4 searches the ids of all rows and fails, and Gemma 3n leaves them out, of the step's other
        # requests too. Rows that replace ids have those of padding, as images have in the whole class.
        ids, padding = input_ids.clone(), getattr(parts.body.config, "pad_token_id", None) or 0
        for start, rows in embeds:
            ids[start : start + len(rows)] = padding
        inputs["per_layer_inputs"] = parts.body.get_per_layer_inputs(ids[None])
    return inputs


def _body_name(model: Any) -> str:
    """Return the name of the part of a causal model that computes hidden states."""
    children: dict[str, torch.nn.Module] = dict(model.named_children())
    if model.base_model_prefix in children:
        return str(model.base_model_prefix)
    decoder = model.get_decoder()
    for name, child in children.items():
        if child is decoder:
            return name
    raise UnservableModel("has no part that computes hidden states separately from logits")


__all__ = ["TransformersModel", "check_checkpoint", "known_entries", "read_declared", "reads_entries"]


def read_declared(path: Path, dtype: DtypeName, quantization: str | None, max_length: int | None) -> ModelConfig:
    """Return what a checkpoint's configuration declares, without what only its modules show (scales, windows).

    ``max_length`` is what the engine's options allow. Raises ``ValueError``.
    """
    found = find_causal_class(path)
    declared = declared_config(found.config, dtype, quantization, max_length)
    return dataclasses.replace(declared, scheme=found.scheme)


def reads_entries(path: Path, names: Sequence[str]) -> bool:
    """Return whether transformers reads the checkpoint's configuration, and its class knows these entries of it."""
    try:
        return known_entries(type(find_causal_class(path).config)).issuperset(names)
    except ValueError:
        return False


def known_entries(config_class: Any) -> frozenset[str]:
    """Return the entries that a class of transformers' configurations has."""
    defaults = config_class()
    names = {name for name in dir(defaults) if not name.startswith("_") and not callable(getattr(defaults, name, len))}
    return frozenset(names | (getattr(defaults, "rope_parameters", None) or {}).keys())


def check_checkpoint(path: Path, dtype: DtypeName) -> None:
    """Compare the shapes of a checkpoint's tensors with its configuration, without reading their content.

    Raises ``ValueError``. Tensors that transformers stores under other names than it computes with are not compared.
    """
    found, computed_in = find_causal_class(path), as_torch(dtype)
    with Checkpoint(path, computed_in, torch.device("meta"), found.scheme) as checkpoint:
        for name, tensor in make_on_meta(found, computed_in).state_dict().items():
            if name in checkpoint:
                checkpoint.take(name, *tensor.shape)
