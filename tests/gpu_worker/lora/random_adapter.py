"""Adapters with random tensors for a checkpoint, and the checkpoint with one of them merged into its weights."""

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"


def save_adapter(
    path: Path, checkpoint: Path, *, rank: int = 4, seed: int = 0, kinds: Collection[str] = KINDS, **entries: Any
) -> Path:
    """Write an adapter in peft's layout; ``entries`` of its configuration replace the defaults, and say what else than
    matrices it has."""
    path.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(kinds)}
    config |= entries
    generator = torch.Generator().manual_seed(seed)
    weights = _load_untied(checkpoint)
    tensors: dict[str, Tensor] = {}
    for layer, weight in _linear_layers(weights, kinds, has_experts=config.pop("has_experts", False)):
        tensors |= {f"{PREFIX}{layer}.{end}": each for end, each in _random(layer, weight, config, generator).items()}
    tensors |= _biases(weights, tensors, config["bias"], generator)
    tensors |= _of_all_experts(weights, config, generator)
    for name, weight in weights.items():
        if name.split(".")[-2] in config.get("modules_to_save", ()):
            tensors[PREFIX + name] = weight + torch.randn(weight.shape, generator=generator) * weight.std()
    save_file(tensors, path / WEIGHTS)
    config.pop("save_embedding_layers", None)  # an argument of peft's save_pretrained
    (path / CONFIG).write_text(json.dumps(config))
    return path


def _load_untied(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with an output layer of its own."""
    weights = load_file(checkpoint / "model.safetensors")
    if EMBEDDINGS in weights:
        weights.setdefault("lm_head.weight", weights[EMBEDDINGS].clone())
    return weights


def _linear_layers(
    weights: Mapping[str, Tensor], kinds: Collection[str], *, has_experts: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in kinds and weight.dim() == 2 and (has_experts or ".experts." not in layer):
            yield layer, weight


def _random(layer: str, weight: Tensor, config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    (outputs, inputs), rank = weight.shape, of_pattern(config, "rank_pattern", layer, config["r"])
    a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
    b = torch.randn(outputs, rank, generator=generator) * 0.3
    if f"{layer}.weight" == EMBEDDINGS:
        # Of an embedding [tokens, size] A has a column for each token. Where embeddings are a target, peft saves the
        # model's own weight too.
        own = {"base_layer.weight": weight} if config.get("save_embedding_layers", True) else {}
        return {"lora_embedding_A": b.t().contiguous(), "lora_embedding_B": a.t().contiguous(), **own}
    tensors = {"lora_A.weight": a, "lora_B.weight": b}
    if config.get("lora_bias"):
        tensors["lora_B.bias"] = torch.randn(outputs, generator=generator) * 0.3
    if config.get("use_dora"):
        tensors["lora_magnitude_vector"] = weight.norm(dim=1) * (0.4 + torch.rand(outputs, generator=generator))
    return tensors


_EXPERT = re.compile(r"(.*\.layers\.\d+\.)[^.]+\.experts\.(\d+)\.(\w+)\.weight")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def _experts_of(weights: Mapping[str, Tensor]) -> dict[str, dict[int, dict[str, str]]]:
    """The names of all experts' matrices, by layer, expert and ``gate``, ``up`` or ``down``."""
    kinds = {name: kind for kind, names in (("gate", _GATE), ("up", _UP), ("down", _DOWN)) for name in names}
    layers: dict[str, dict[int, dict[str, str]]] = {}
    for name in weights:
        if found := _EXPERT.fullmatch(name):
            layers.setdefault(found[1], {}).setdefault(int(found[2]), {})[kinds[found[3]]] = name
    return layers


def _of_all_experts(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """Matrices of tensors that hold all experts, as peft's ``ParamWrapper`` has them: the first target of a module is
    the inner one, ``base_layer``."""
    tensors, targets = {}, [each.rpartition(".")[2] for each in config.get("target_parameters", ())]
    for layer, experts in _experts_of(weights).items() if targets else ():
        (size, hidden), count, rank = weights[experts[0]["gate"]].shape, len(experts), config["r"]
        shapes = {"gate_up_proj": (2 * size, hidden), "down_proj": (hidden, size)}
        for target in targets:
            outputs, inputs = shapes[target]
            inner = ".base_layer" if target == "gate_up_proj" and len(targets) > 1 else ""
            name = f"{PREFIX}{layer}mlp.experts{inner}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(count * rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank * count, generator=generator) * 0.3
    return tensors


def _merge_all_experts(weights: dict[str, Tensor], name: str, change: "Change", target: str) -> None:
    """Do what peft's ``ParamWrapper.get_delta_weight`` and ``merge`` do."""
    experts = _experts_of(weights)[name.partition("mlp.experts")[0]]
    a, b = change.tensors["lora_A.weight"], change.tensors["lora_B.weight"]
    a, b = a.reshape(len(experts), -1, a.shape[1]), b.reshape(len(b), -1, len(experts))
    delta = torch.einsum("o r e, e r i -> e o i", b, a) * change.scaling
    for number, names in experts.items():
        halves = delta[number].chunk(2) if target == "gate_up_proj" else [delta[number]]
        for kind, part in zip(("gate", "up") if len(halves) > 1 else ("down",), halves, strict=True):
            weights[names[kind]] = weights[names[kind]] + part


def _biases(
    weights: Mapping[str, Tensor], adapted: Collection[str], kind: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """Biases under the names that peft's ``_get_learnable_bias_state_dict`` gives them."""
    found = {}
    for name, bias in weights.items():
        layer = name.removesuffix(".bias")
        is_adapted = f"{PREFIX}{layer}.lora_A.weight" in adapted
        if name.endswith(".bias") and (kind == "all" or (kind == "lora_only" and is_adapted)):
            stored = f"{layer}.base_layer.bias" if is_adapted else name
            found[f"{PREFIX}{stored}"] = bias + torch.randn(bias.shape, generator=generator) * 0.5
    return found


def of_pattern(config: Mapping[str, Any], key: str, layer: str, default: Any) -> Any:
    """What peft's ``get_pattern_key`` finds for a layer."""
    found = (value for each, value in config.get(key, {}).items() if re.match(rf"(.*\.)?({each})$", layer))
    return next(found, default)


class Change(NamedTuple):
    """What an adapter stores for one layer, by the ends of the tensors' names, and its scaling."""

    tensors: dict[str, Tensor]
    scaling: float

    @property
    def delta(self) -> Tensor:
        """What peft's ``get_delta_weight`` returns."""
        return self.scaling * (self.tensors["lora_B.weight"] @ self.tensors["lora_A.weight"])


def _patterned(layer: str, config: Mapping[str, Any]) -> str:
    """What peft matches patterns with: of a tensor of all experts, the tensor's name."""
    if not layer.endswith((".experts", ".experts.base_layer")):
        return layer
    return f"{layer.removesuffix('.base_layer')}.{_target_of(layer, config)}"


def _target_of(layer: str, config: Mapping[str, Any]) -> str:
    targets = [each.rpartition(".")[2] for each in config["target_parameters"]]
    return targets[0 if layer.endswith(".base_layer") or len(targets) == 1 else 1]


def changes_of(adapter: Path) -> dict[str, Change]:
    """What an adapter stores, by the names of layers."""
    config = json.loads((adapter / CONFIG).read_text())
    changes: dict[str, Change] = {}
    for key, tensor in load_file(adapter / WEIGHTS).items():
        found = re.fullmatch(r"(.+?)\.(lora_.+|(?:base_layer\.)?(?:bias|weight))", key.removeprefix(PREFIX))
        assert found is not None
        layer, name = found[1], _patterned(found[1], config)
        rank = of_pattern(config, "rank_pattern", name, config["r"])
        alpha = of_pattern(config, "alpha_pattern", name, config["lora_alpha"])
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        changes.setdefault(layer, Change({}, scaling)).tensors[found[2].removeprefix("base_layer.")] = tensor
    return changes


def merge(checkpoint: Path, adapter: Path, path: Path) -> Path:
    """Write a copy of the checkpoint with the adapter merged into its weights, as peft's ``merge_and_unload`` does."""
    shutil.copytree(checkpoint, path)
    weights, changes = load_file(checkpoint / "model.safetensors"), changes_of(adapter)
    entries = json.loads((adapter / CONFIG).read_text())
    is_tied = entries.get("ensure_weight_tying")
    if not is_tied and {"model.embed_tokens", "lm_head"} & changes.keys():
        weights = _load_untied(checkpoint)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for name, change in changes.items():
        if name.endswith((".experts", ".experts.base_layer")):
            _merge_all_experts(weights, name, change, _target_of(name, entries))
            continue
        _merge(weights, name, change)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _merge(weights: dict[str, Tensor], name: str, change: Change) -> None:
    tensors = change.tensors
    if "weight" in tensors:
        weights[f"{name}.weight"] = tensors["weight"]
    if "lora_embedding_A" in tensors:
        delta = change.scaling * (tensors["lora_embedding_B"] @ tensors["lora_embedding_A"])
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta.t()
    if "lora_A.weight" in tensors:
        merged = weights[f"{name}.weight"] + change.delta
        if (magnitude := tensors.get("lora_magnitude_vector")) is not None:
            merged = merged * (magnitude / merged.norm(dim=1))[:, None]
        weights[f"{name}.weight"] = merged
    if "bias" in tensors:
        weights[f"{name}.bias"] = tensors["bias"]
    if "lora_B.bias" in tensors:
        weights[f"{name}.bias"] = weights[f"{name}.bias"] + change.scaling * tensors["lora_B.bias"]
