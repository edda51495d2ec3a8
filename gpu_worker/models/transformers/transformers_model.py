"""Computes any causal language model of transformers over paged attention, with the tokens of a step in one row."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.process.memory import return_freed

from ...attention.attention_backend import AttentionPlan, KVCache
from ...attention.states import StatePlan
from ...checkpoint.files.config_reader import read_media
from ...checkpoint.files.text_part import MediaSwitches
from ...checkpoint.gguf.config import described_by
from ...checkpoint.local_config import HEADS_DIFFER
from ...checkpoint.model_config import DtypeName, ModelConfig, as_torch
from ...checkpoint.weights import Adapt, Checkpoint
from ...layers.embedding import InputEmbeds
from ...layers.expert_routes import ExpertRoutes
from ...layers.linear import ROUNDS_ROWS
from ...ops.ops import Ops
from ...parallel.group import ALONE
from ...parallel.ranks import ONLY_RANK, Ranks, Stage
from ...parallel.sharding import RankPlace, Shard
from .declared import complete, declared_config, fix_ropes, max_model_len
from .division import LoadingGroup, divide_layers, divide_stages, stage_names
from .experts import routes_of_modules
from .loading import CausalClass, find_causal_class, load_modules, make_on_meta
from .modules import Head, adapt_layers
from .paged_attention import NUM_PROBED, SERVING, EnoughLayers, LayerRule, PagedAttention, UnservableModel, bind, record
from .states import LayersWithStates, keeps_states


@dataclass(frozen=True)
class _Parts:
    """Holds one loaded checkpoint."""

    model: Any
    body: Any
    """The part of ``model`` that computes hidden states."""
    head: Head | None
    """None: another stage computes logits."""
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
        ranks: Ranks = ONLY_RANK,
        adapt: Adapt | None = None,
    ) -> None:
        """Load the checkpoint directory ``path``, or the part of it that this one of ``ranks`` computes;
        ``max_model_len`` is that of the engine's options, ``adapt`` that of :class:`Checkpoint`. Raises ``ValueError``
        naming what cannot be served, and why."""
        self._dtype_name, self._dtype, self._device = dtype, as_torch(dtype), device
        self._ops = ops
        self._quantization = quantization
        self._wanted_length = max_model_len
        self._ranks = ranks
        self._adapt = adapt
        self._stage: Stage | None = None
        self._num_layers: int | None = None  # of this stage; None: there is one
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
        inputs = self._inputs(input_ids, embeds)
        parts.attention.begin(plan, kv_caches)
        if parts.states is not None and states is not None:
            parts.states.begin(states)
        try:
            output = parts.body(**inputs, position_ids=positions[None], use_cache=False)
            hidden: Tensor = output.last_hidden_state[0]
        except EnoughLayers:
            hidden = torch.zeros(len(input_ids), self.config.hidden_size, dtype=self._dtype, device=self._device)
        finally:
            parts.attention.end()
            if parts.states is not None:
                parts.states.end()
        return self._leave(hidden)

    def _inputs(self, input_ids: Tensor, embeds: InputEmbeds = ()) -> dict[str, Tensor]:
        """Return what the body is called with: tokens, or the hidden states of the stage before."""
        if self._stage is not None and self.config.first_layer > 0:
            return {"inputs_embeds": self._stage.receive(len(input_ids))[None]}
        return _embed(self._parts, input_ids, embeds) if embeds else {"input_ids": input_ids[None]}

    def _leave(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states, or those that go to the stage behind."""
        return hidden if self._stage is None or self.config.is_last_stage else self._stage.send(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self._parts.head
        return hidden.float() if head is None else head(hidden)

    @property
    def has_plain_embeddings(self) -> bool:
        """Return whether tokens begin with rows of the matrix ``model.embed_tokens``, and with nothing else."""
        parts = self._parts
        found, modules = parts.model.get_input_embeddings(), dict(parts.model.named_modules())
        is_plain = type(found) is torch.nn.Embedding and modules.get("model.embed_tokens") is found
        return is_plain and not getattr(parts.body, "hidden_size_per_layer_input", 0)

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens [T]."""
        found: Tensor = self._parts.model.get_input_embeddings()(input_ids)
        return found

    @torch.inference_mode()
    def compute_eagerly(self, input_ids: Tensor, positions: Tensor | None = None, attention: str = "eager") -> Tensor:
        """Compute the logits [T, vocab_size] of one sequence [T] in one pass, with transformers' own attention.

        ``positions`` [T]: None leaves their numbering to the model. ``attention``: as transformers names it. A stage
        that is not the last one returns hidden states, as :meth:`compute_logits` does.
        """
        model, body = self._parts.model, self._parts.body
        numbered = {} if positions is None else {"position_ids": positions[None]}
        model.set_attn_implementation(attention)
        try:
            inputs = self._inputs(input_ids)
            if not self.config.is_last_stage:
                return self._leave(body(**inputs, use_cache=False, **numbered).last_hidden_state[0]).float()
            logits: Tensor = model(**inputs, use_cache=False, **numbered).logits[0]
        finally:
            model.set_attn_implementation(SERVING)
        return logits.float()

    @property
    def num_attention_calls(self) -> int:
        """How often the last forward pass attended."""
        return self._parts.attention.num_calls

    @torch.inference_mode()
    def _load(self, path: Path) -> _Parts:
        found, place = find_causal_class(path), self._ranks.place
        self.architecture, group = found.architecture, LoadingGroup(self._ranks.group)
        divide = None
        if not place.is_whole:
            check_ranks(found, path, place, self._dtype, self._quantization)
            divide = _naming(found, path, partial(self._divide, group))
        model = load_modules(found, path, self._dtype, self._device, self._ops, self._quantization, divide)
        try:
            parts = self._take(found, model, None if is_gguf(path) else read_media(path))
            group.open()
            return parts
        except Exception as error:  # a module may fail in any way
            reason = str(error) if isinstance(error, UnservableModel) else f"fails ({type(error).__name__}: {error})"
            raise ValueError(f"{described_by(path)}: {found.architecture} is not supported: it {reason}") from error

    def _divide(self, group: LoadingGroup, model: Any) -> None:
        """Leave the part of ``model`` that this rank computes."""
        place = self._ranks.place
        if place.num_stages > 1:
            hidden_size = model.config.get_text_config(decoder=True).hidden_size
            self._num_layers = divide_stages(getattr(model, body_name(model)), place, hidden_size)
        if place.stage < place.num_stages - 1:
            model.set_output_embeddings(torch.nn.Identity())
        if place.tensor_size > 1:
            divide_layers(model, place, group, self._quantization)

    def _take(self, found: CausalClass, model: Any, media: MediaSwitches | None) -> _Parts:
        name_of_body = body_name(model)
        body = getattr(model, name_of_body)
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
        given = None
        if self._ranks.place.stage > 0:
            given = torch.ones(1, NUM_PROBED, declared.hidden_size, dtype=self._dtype, device=self._device)
        rules = record(body, model, declared.max_model_len, self._device, given)
        self.routes = routes_of_modules(body, NUM_PROBED)
        layout, place = None if states is None else states.layout, self._ranks.place
        if self._adapt is not None and states is None:  # layers with states are computed sequence by sequence
            if place.tensor_size > 1 and self._quantization in ROUNDS_ROWS:
                raise UnservableModel(f"has no adapters over workers with {self._quantization}: leave out one of them")
            adapt_layers(model, partial(_compute_some, model, body, self._device, given), self._adapt, self._dtype)
        text, count = found.config.get_text_config(decoder=True), self._num_layers
        self._set_config(_of_rank(complete(declared, text, rules, layout, count), place, declared.num_layers))
        if place.num_stages > 1:
            self._stage = Stage(self._ranks, self.config.hidden_size, self._dtype)
        sizes = [shape.head_size for shape in self.config.kv_shapes] or [self.config.head_size] * len(rules)
        attention = PagedAttention(self._showing_images(rules), sizes)
        bind(model, attention)
        model.set_attn_implementation(SERVING)
        head = None
        try:
            if self.config.is_last_stage:
                head = Head(model, name_of_body, declared.hidden_size, self._device, self._dtype)
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


def _of_rank(config: ModelConfig, place: RankPlace, num_layers: int) -> ModelConfig:
    """Return the configuration of a rank's modules, with its place among the ranks. ``num_layers``: of the model."""
    if place.is_whole:
        return config
    if place.spreads_context and config.kv_shapes:
        raise UnservableModel(HEADS_DIFFER)
    num_kv_heads = config.num_kv_heads * place.tensor_size  # plans divide them evenly
    return dataclasses.replace(
        config,
        shard=Shard(place.tensor_rank, place.tensor_size, num_kv_heads, place.spreads_context, cuts_vocabulary=False),
        first_layer=place.layers(num_layers).start,
        layers_of_model=num_layers,
        is_last_stage=place.stage == place.num_stages - 1,
        samples=place.samples,
    )


def check_ranks(found: CausalClass, path: Path, place: RankPlace, dtype: torch.dtype, quantization: str | None) -> None:
    """Raise ``ValueError`` naming what of a model cannot be divided among ranks, before its weights are read."""

    def check(model: Any) -> None:
        if place.prefill_size > 1:
            raise UnservableModel("divides no prompts among workers: leave out prefill_context_parallel_size")
        if found.scheme is not None or is_gguf(path):
            raise UnservableModel("has weights in few bits, which are not divided among workers: use one worker")
        if keeps_states(found.config):
            raise UnservableModel("keeps a state between tokens, which is not divided among workers: use one worker")
        if place.num_stages > 1:
            stage_names(getattr(model, body_name(model)))
        if place.tensor_size > 1:
            divide_layers(model, place, ALONE, quantization)

    _naming(found, path, check)(make_on_meta(found, dtype))


def _naming(found: CausalClass, path: Path, divide: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``divide``, whose refusals then name the model."""

    def named(model: Any) -> None:
        try:
            divide(model)
        except UnservableModel as error:
            raise ValueError(f"{described_by(path)}: {found.architecture} {error}") from None

    return named


def _compute_some(model: Any, body: Any, device: torch.device, given: Tensor | None, count: int = 7) -> int:
    """Compute a few different tokens with transformers' own attention. Returns how many. ``given``: what a later stage
    is given in their place, [1, n, hidden_size]."""
    model.set_attn_implementation("eager")
    if given is not None:
        body(inputs_embeds=given, use_cache=False)
        return given.shape[1]
    body(input_ids=torch.arange(count, device=device)[None], use_cache=False)
    return count


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


def body_name(model: Any) -> str:
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
    """Return whether transformers reads the checkpoint's configuration, and its class reads these entries of it."""
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
