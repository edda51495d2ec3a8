"""Reads what a LoRA adapter in the layout of the peft library changes, by the layers that it names."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from tokenloom.engine_core.data.lora import CONFIG, WEIGHTS, AdapterFiles, pattern_value, read_rank

from ..checkpoint.files.text_part import text_tensor
from ..checkpoint.weights import built_in_name

EMBEDDINGS, OUTPUT, CLASSES = "model.embed_tokens", "lm_head", "score"
"""The names of what turns tokens into states, and states into logits of tokens or of classes."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""The tensors of all experts of a layer."""
EXPERT = re.compile(r"(.*\.layers\.\d+\.)[^.]+\.experts\.(\d+)\.(\w+)")
"""Fits the name of an expert's matrix: the layer, the expert's number and the matrix."""
_ALL_EXPERTS = re.compile(rf"(.*\.layers\.\d+\.)[^.]+\.experts\.({GATE_UP}|{DOWN})")
_MATRICES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
TIED = "lm_head (tied)"
"""The name of a change of the output layer that follows from one of the embeddings, if the model ties them."""
_PREFIX = "base_model.model."
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin a training that change the base model's own weights too, so that the adapter does not fit them."""
# Entries of adapter_config.json that say nothing about what is computed, or that are read here.
_UNDERSTOOD = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"),
        *("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save", "ensure_weight_tying"),
        "target_parameters",
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
        *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config"),
    }
)
_BIASES = ("none", "all", "lora_only")
_FIELDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    **{f"{above}{kind}": kind for above in ("", "base_layer.", "modules_to_save.") for kind in ("bias", "weight")},
}
"""Where a tensor is kept, by the end of its name behind that of its layer."""
_KEY = re.compile(rf"(.+?)\.({'|'.join(re.escape(each) for each in sorted(_FIELDS, key=len, reverse=True))})")


@dataclass(slots=True)
class StoredChange:
    """Holds what an adapter stores for one layer, float32."""

    a: Tensor | None = None
    """[rank, inputs]; None as :attr:`b` is: the adapter has no matrices here."""
    b: Tensor | None = None
    """[outputs, rank]"""
    b_bias: Tensor | None = None
    """[outputs]: added to the product of the matrices, before the scaling."""
    magnitude: Tensor | None = None
    """[outputs]: what norm each row of the changed weight has (DoRA)."""
    bias: Tensor | None = None
    """[outputs]: in the place of the layer's own."""
    weight: Tensor | None = None
    """[outputs, inputs], or [inputs, outputs] of embeddings: in the place of the layer's own (modules_to_save)."""
    scaling: float = 1.0
    """On the product of the matrices and on :attr:`b_bias`."""
    rank: int = 0
    """What the configuration says of this layer."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with what errors call them."""
        named = (("matrix A", self.a), ("matrix B", self.b), ("bias of B", self.b_bias))
        more = (("magnitude vector", self.magnitude), ("bias", self.bias), ("weight", self.weight))
        for name, tensor in (*named, *more):
            if tensor is not None:
                yield name, tensor


def read_changes(
    files: AdapterFiles, max_rank: int, *, reads_media: bool = False, names: Mapping[str, str] | None = None
) -> dict[str, StoredChange]:
    """Return what an adapter changes, by the names that a built-in checkpoint of text gives layers. ``reads_media``:
    whether prompts have images or sounds, which another process encodes. ``names``: what a plugin's architecture calls
    tensors, as in :class:`..checkpoint.weights.RenamedSource`. Raises ``ValueError`` naming what is wrong or not
    supported."""
    try:
        read_rank(files.config, max_rank)
        _check_config(files.config)
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from None
    try:
        changes = _by_layer(_tensors(files.weights), files.config, names or {}, reads_media=reads_media)
        for name, change in changes.items():
            _check(name, change, files.config)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{WEIGHTS}: {error}") from None
    is_tying = files.config.get("ensure_weight_tying") and OUTPUT not in changes
    if is_tying and (embeddings := changes.get(EMBEDDINGS)):
        changes[TIED] = _transposed(embeddings)
    return changes


def _tensors(weights: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(weights)
    except KeyError as error:
        raise ValueError(f"the dtype {error} is not supported") from None


def layer_name(name: str) -> str:
    """Return the name of a layer of text, which Mamba-2's files and classes begin in two ways."""
    return re.sub(r"^backbone\.", "model.", name)


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for what is not computed."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {config.get('peft_type')!r}; only LORA is supported")
    if config.get("bias", "none") not in _BIASES:
        raise ValueError(f"bias is {config['bias']!r}; it must be one of {', '.join(_BIASES)}")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGED_BASES):
        raise ValueError(
            f"init_lora_weights is {initial!r}, which changes the base model's weights; convert the adapter"
        )
    if not isinstance(config.get("target_parameters") or [], list):
        raise ValueError(f"target_parameters must be a list of names, not {config['target_parameters']!r}")
    if config.get("use_dora") and config.get("lora_bias"):
        raise ValueError("lora_bias is set together with use_dora, which peft does not train either")
    for key, value in config.items():
        if value and key not in _UNDERSTOOD:
            raise ValueError(f"{key} is set, which is not supported")


def _scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return the factor on the product of a layer's matrices. Raises ``ValueError``."""
    alpha = pattern_value(config, "alpha_pattern", name, config.get("lora_alpha", 8))
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise ValueError(f"lora_alpha of {name} must be a finite number, not {alpha!r}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _by_layer(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: Mapping[str, str], *, reads_media: bool
) -> dict[str, StoredChange]:
    changes: dict[str, StoredChange] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else None
        if found is None:
            raise ValueError(f"tensor {key} is not supported; those of linear layers and of embeddings are")
        own_name = _parameter_of(found[1], tensors, config)
        # A part of a name may end behind the layer's own, as ".query." does.
        layer = text_tensor(built_in_name(f"{own_name}.weight", names).removesuffix(".weight"))
        if layer is None and reads_media:
            raise ValueError(f"{own_name} changes how images or sounds are read; serve it with --language-model-only")
        if layer is None:  # it changes no text
            continue
        change = changes.setdefault(layer_name(layer), StoredChange())
        if not change.rank:
            # Patterns are matched with the names that the adapter's own file has.
            change.rank = pattern_value(config, "rank_pattern", own_name, config["r"])
            change.scaling = _scaling(config, own_name, change.rank)
        is_matrix = _FIELDS[found[2]] in ("a", "b")
        if is_matrix and ("embedding" in found[2]) != (layer == EMBEDDINGS):
            raise ValueError(f"tensor {key} is not supported; {EMBEDDINGS} alone has lora_embedding_A and _B")
        if getattr(change, _FIELDS[found[2]]) is not None:
            raise ValueError(f"tensor {key} is there twice, under two names")
        setattr(change, _FIELDS[found[2]], tensor)
    if not changes:
        raise ValueError("holds no matrices")
    listed = config.get("modules_to_save")
    if listed and not any(key.endswith(".weight") and ".lora_" not in key for key in tensors):
        raise ValueError(f"holds no weight of the layers that {CONFIG} lists as modules_to_save, {listed}")
    return changes


def _parameter_of(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return the name of the tensor of all experts that matrices of ``name`` change (target_parameters); other names
    are returned as they are."""
    # A module with two such tensors is wrapped twice, so that the first one's matrices are those of base_layer.
    module = name.removesuffix(".base_layer")
    if not module.endswith(".experts"):
        return name
    targets = [str(each).rpartition(".")[2] for each in config.get("target_parameters") or ()]
    has_both = f"{_PREFIX}{module}.base_layer.lora_A.weight" in tensors
    is_down = not name.endswith(".base_layer") if has_both else GATE_UP not in targets
    return f"{module}.{DOWN if is_down else GATE_UP}"


def split_experts(
    changes: Mapping[str, StoredChange], shapes: Mapping[str, tuple[int, int]], num_experts: int, *, takes_turns: bool
) -> dict[str, StoredChange]:
    """Return the changes with one of its own for each expert's matrix where the adapter has one for those of all.

    Raises ``ValueError`` naming a change whose shape does not fit.

    Args:
        shapes: (outputs, inputs) of the layers that may have adapters, by name.
        num_experts: Of a layer, on all ranks.
        takes_turns: Whether gates and ups take turns among outputs; otherwise ups follow gates.
    """
    found = {name: match for name in changes if (match := _ALL_EXPERTS.fullmatch(name))}
    result = {name: change for name, change in changes.items() if name not in found}
    if not found:
        return result
    experts: dict[tuple[str, str], dict[int, str]] = {}
    for name in shapes:
        if match := EXPERT.fullmatch(name):
            experts.setdefault((match[1], _MATRICES.get(match[3], "")), {})[int(match[2])] = name
    for name, match in found.items():
        kinds = ("gate", "up") if match[2] == GATE_UP else ("down",)
        own = {(kind, number): own for kind in kinds for number, own in experts.get((match[1], kind), {}).items()}
        if not own:
            result[name] = changes[name]  # which a check of names refuses, unless another stage has the layer
        for (kind, number), each in own.items():
            rows = slice(None)
            if len(kinds) > 1:
                size, which = shapes[each][0], kinds.index(kind)
                rows = slice(which, None, 2) if takes_turns else slice(which * size, (which + 1) * size)
            sizes = (shapes[each][0] * len(kinds), shapes[each][1])
            if each in result:
                raise ValueError(f"{each} has matrices of its own and in {name}")
            result[each] = _of_expert(name, changes[name], (number, num_experts), sizes, rows)
    return result


def _of_expert(
    name: str, change: StoredChange, place: tuple[int, int], shape: tuple[int, int], rows: slice
) -> StoredChange:
    """Return what changes one of all experts. ``place``: its number, and how many there are. ``shape``: (outputs,
    inputs) of its part of the tensor of all, of which it has ``rows``."""
    (number, count), rank = place, change.rank
    if change.a is None or change.b is None or change.weight is not None or change.bias is not None:
        raise ValueError(f"{name} has other tensors than the matrices A and B of all experts")
    if len(change.a) != rank * count or change.b.shape[1:] != (rank * count,):
        expected = f"matrices of rank {rank} for {count} experts"
        raise ValueError(f"{name} has shapes {list(change.a.shape)} and {list(change.b.shape)}; expected {expected}")
    # As peft: rows of A by expert and rank, columns of B by rank and expert.
    a, b = change.a.view(count, rank, -1)[number], change.b.view(-1, rank, count)[..., number]
    if (len(b), a.shape[1]) == shape[::-1] and shape[0] != shape[1]:
        a, b = b.t(), a.t()  # of a tensor [experts, inputs, outputs] whose class does not say so
    if (len(b), a.shape[1]) != shape:
        raise ValueError(f"{name} maps {a.shape[1]} inputs to {len(b)} outputs; expected {shape[1]} to {shape[0]}")
    return StoredChange(a, b[rows], scaling=change.scaling, rank=rank)


def _transposed(embeddings: StoredChange) -> StoredChange:
    """Return the same change of an output layer that is tied to the embeddings."""
    a, b = (None if each is None else each.t().contiguous() for each in (embeddings.b, embeddings.a))
    return StoredChange(a, b, weight=embeddings.weight, scaling=embeddings.scaling, rank=embeddings.rank)


def _check(name: str, change: StoredChange, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the tensors of a layer belong together and are finite; make them float32."""
    if (change.a is None) != (change.b is None):
        raise ValueError(f"{name} has only one of its two matrices")
    if change.a is None and (change.magnitude is not None or change.b_bias is not None):
        raise ValueError(f"{name} has a magnitude vector or a bias of B, but no matrices")
    if change.magnitude is not None and (change.weight is not None or name == EMBEDDINGS):
        raise ValueError(f"{name} has a magnitude vector, which is supported only where a linear layer has matrices")
    if change.a is not None and name != EMBEDDINGS and (change.magnitude is not None) != bool(config.get("use_dora")):
        lacks = "has no magnitude vector" if config.get("use_dora") else "has a magnitude vector"
        raise ValueError(f"{name} {lacks}, and {CONFIG} says use_dora {bool(config.get('use_dora'))}")
    for field in set(_FIELDS.values()):
        tensor = getattr(change, field)
        if tensor is not None and tensor.is_floating_point():
            setattr(change, field, tensor.float())
    for kind, tensor in change.tensors():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{kind} of {name} does not consist of finite numbers")
    for kind, tensor in (("matrix A", change.a), ("matrix B", change.b), ("weight", change.weight)):
        if tensor is not None and tensor.dim() != 2:
            raise ValueError(f"{kind} of {name} has shape {list(tensor.shape)}; expected two dimensions")
