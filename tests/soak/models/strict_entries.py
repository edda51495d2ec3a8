"""Reads from the classes of transformers' configurations which values of each entry they refuse."""

import dataclasses
import types
import typing
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from tests.soak.models.tiny_configs import tiny_config
from tokenloom.gpu_worker.checkpoint.files.architectures import ENCODERS, MODULE_ENCODERS

_NAMES = {int: "int", float: "float", bool: "bool", str: "str", list: "list", dict: "dict", type(None): "null"}


def encoder_types() -> list[str]:
    """Return the types of the encoders that transformers' modules compute, in order."""
    names = MODULE_ENCODERS - set(ENCODERS)
    # The encoders of T5 and its variants are no class that the library finds by their type.
    found = {"t5", "mt5", "umt5"}
    for table in (MODEL_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        found |= {kind for kind, name in table.items() if names & ({name} if isinstance(name, str) else set(name))}
    return sorted(found)


def encoder_class(kind: str) -> Any:
    """Return the class of transformers whose modules compute the vectors of a type."""
    names = (f"{CONFIG_MAPPING[kind].__name__.removesuffix('Config')}EncoderModel", MODEL_MAPPING_NAMES[kind])
    return getattr(transformers, next(name for name in names if name in MODULE_ENCODERS))


def paddings(kinds: Iterable[str]) -> dict[str, int | None]:
    """Return the row of padding, if the configuration states none, of the types that count positions from the next."""
    with torch.device("meta"):
        models = {kind: encoder_class(kind)(CONFIG_MAPPING[kind]()) for kind in kinds}
    tables = {
        kind: getattr(getattr(model, "embeddings", None), "position_embeddings", None) for kind, model in models.items()
    }
    return {
        kind: models[kind].config.pad_token_id
        for kind, table in tables.items()
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None
    }


def text_types(kinds: Iterable[str]) -> set[str]:
    """Return the types of the text models inside others."""
    parts = [CONFIG_MAPPING[kind].sub_configs.get("text_config") for kind in kinds]
    return {kind for kind in (getattr(part, "model_type", None) for part in parts) if kind in CONFIG_MAPPING}


def strict_kinds(kind: str) -> dict[str, str]:
    """Return the names of a type's entries, by the kinds of JSON values that its class accepts for them."""
    config_class: Any = CONFIG_MAPPING[kind]
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(config_class):
        kinds = _kinds(field.type)
        if kinds:
            names = [field.name, *(name for name, own in config_class.attribute_map.items() if own == field.name)]
            found.setdefault(" ".join(sorted(kinds)), []).extend(names)
    for name, accepted in _computed_kinds(kind).items():
        found.setdefault(accepted, []).append(name)
    return {kinds: " ".join(names) for kinds, names in sorted(found.items())}


_VALUES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "bool": (True, False),
    "float": (0.5,),
    "str": ("x",),
    "list": ([],),
    "dict": ({},),
}


def _computed_kinds(kind: str) -> dict[str, str]:
    """Return the kinds of JSON values with which a model is made, for the numbers and names that a type's configuration
    computes and that must have some kinds: files that it wrote state them, and replace what is computed."""
    config_class: Any = CONFIG_MAPPING[kind]
    try:
        entries = tiny_config(kind).to_dict()
    except Exception:  # of a class that the small sizes do not fit
        return {}
    declared = {each.name for each in dataclasses.fields(config_class)} | set(config_class.attribute_map) | _COMMON
    found = {}
    for name in entries.keys() - declared:
        own = _NAMES.get(type(entries[name]))
        if own in ("int", "str") and _builds(kind, name, (entries[name],)):
            accepted = {own, *(each for each, values in _VALUES.items() if _builds(kind, name, values))}
            if len(accepted) < len(_NAMES) - 1:
                found[name] = " ".join(sorted(accepted))
    return dict(sorted(found.items()))


_COMMON = frozenset(transformers.PreTrainedConfig().to_dict())


def _builds(kind: str, name: str, values: Iterable[Any]) -> bool:
    """Return whether a model of a type can be made with each of these values of an entry."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    model_class: Any = getattr(transformers, causal) if causal is not None else encoder_class(kind)
    for value in values:
        config = tiny_config(kind)
        setattr(config, name, value)
        try:
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):
                model_class(config)
        except Exception:  # whatever transformers' code raises for such a value
            return False
    return True


def _kinds(annotation: Any) -> set[str] | None:
    """Return the kinds of JSON values that fit an annotation; None: the library checks it not, or not by kinds."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_kinds(part) for part in typing.get_args(annotation)]
        return None if None in parts else set().union(*(part for part in parts if part is not None))
    if origin is typing.Literal:
        return {_NAMES[type(value)] for value in typing.get_args(annotation)}
    if annotation in _NAMES or origin in _NAMES:
        return {_NAMES[origin or annotation]}
    return set() if origin is tuple or isinstance(annotation, type) else None


def strict_rules(kinds: Sequence[str]) -> dict[str, list[str]]:
    """Return the types whose classes compare entries, by what they compare; the names are those of ``served_how``."""
    return {
        "heads": [
            kind for kind in kinds if _refuses(kind, hidden_size=64, num_attention_heads=5) or _cannot_divide(kind)
        ],
        "layer kinds": [kind for kind in kinds if _refuses(kind, num_hidden_layers=2, layer_types=["odd", "odd"])],
        "layer count": [kind for kind in kinds if _refuses_layers(kind, 3) and not _refuses_layers(kind, 2)],
    }


_OTHER_LAYERS: dict[str, dict[str, Any]] = {"gpt_neo": {"attention_types": [[["global", "local"], 1]]}}
"""What else counts two layers in a type's configuration."""


def _refuses_layers(kind: str, count: int) -> bool:
    layers = ["full_attention"] * count
    return _refuses(kind, num_hidden_layers=2, layer_types=layers, **_OTHER_LAYERS.get(kind, {}))


def _refuses(kind: str, **entries: Any) -> bool:
    """Return whether the checks of a class refuse these entries together."""
    try:
        CONFIG_MAPPING[kind](**entries)
    except StrictDataclassClassValidationError:
        return True
    except Exception:  # those of a class that computes with them before it checks
        return False
    return False


def _cannot_divide(kind: str) -> bool:
    """Return whether the modules of a type of decoder refuse a number of heads that does not divide the size."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return name is not None and "divisible" in _building(kind, name, 5) and "divisible" not in _building(kind, name, 4)


def _building(kind: str, name: str, num_heads: int) -> str:
    """Return why a model of so many heads cannot be built; empty if it can."""
    try:
        with torch.device("meta"):
            getattr(transformers, name)(
                CONFIG_MAPPING[kind](hidden_size=64, num_attention_heads=num_heads, num_hidden_layers=1)
            )
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


LAYER_KINDS = sorted(ALLOWED_ATTN_LAYER_TYPES)
"""What ``layer_types`` may hold."""
