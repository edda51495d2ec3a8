"""What transformers' modules serve, by the type of a model.

It is data, which ``make models-docs`` writes for the installed version of transformers (``transformers_types.json``).
Another version is not known here: the engine decides.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.gguf.gguf_file import is_gguf

from ..parallel.sharding import RankPlace
from .draft_config import DraftedModel
from .files.architectures import BUILT_IN, STATIC
from .files.config_reader import (
    MOST_LAYERS,
    UnsupportedError,
    brief,
    causal_classes,
    is_class_of_transformers,
)
from .gguf.config import described_by, read_model
from .load_config import read_dtype
from .local_config import (
    HEADS_DIFFER,
    NO_INT8_SHAPES,
)
from .quantization.entries import ENTRY, scheme_for_modules
from .rope_config import LENGTHS, ROPES, check_context, longest_context


class ModuleTypes(TypedDict):
    """Holds what one version of transformers serves."""

    types: dict[str, list[str]]
    """By model type: its class, and why it is refused; empty: it is served; ``untried``: the engine decides."""
    unless: dict[str, list[tuple[str, bool, str]]]
    """By model type: entries with the values for which a type is refused nevertheless, and why."""
    entries: dict[str, list[str]]
    """By model type of a built-in family: the entries that the class of its configuration reads."""
    lengths: dict[str, int]
    """By model type whose positions are not stretched by default: the context if its configuration states none."""
    values: dict[str, list[str]]
    """By entry: the values that the library computes, of those that every class leaves to it."""
    paddings: dict[str, int | None]
    """By model type that counts positions from the row after that of padding: the row if its configuration has none."""
    strict: dict[str, dict[str, str]]
    """By model type, and by the kinds of values that its class accepts: the names of entries."""
    rules: dict[str, list[str]]
    """By what a class compares at load: the model types whose class does."""
    divided: dict[str, list[str]]
    """By model type of which the class has a tensor-parallel plan: the entries that the number of workers divides."""
    staged: list[str]
    """The model types of which the class has a pipeline plan."""
    states: dict[str, int]
    """By model type of which layers keep a state between tokens: the tokens of a chunk of them."""


UNTRIED = "untried"
TYPES_FILE = Path(__file__).with_name("transformers_types.json")


@cache
def transformers_types() -> ModuleTypes | None:
    """Return what was found for the installed version of transformers; None: it is another one, or not installed."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
    types: ModuleTypes | None = json.loads(TYPES_FILE.read_text(encoding="utf-8")).get(version)
    return types


def known_entries(path: Path) -> frozenset[str] | None:
    """Return the entries that transformers' class knows; None: that is not known here."""
    types, kind = transformers_types(), str(read_model(path)[1].get("model_type"))
    return frozenset(types["entries"][kind]) if types is not None and kind in types["entries"] else None


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_TASKS = {
    "Qwen2_5OmniModel": "it reads images, sound and video, and speaks",
    "UltravoxModel": "it reads sound",
    "VoxtralForConditionalGeneration": "its prompts are written by the package mistral-common alone, from tekken.json "
    "and from the sound itself",
    "ForConditionalGeneration": "it reads images or sound, or has an encoder",
    "ForSequenceClassification": "it classifies texts",
    "ForTokenClassification": "it classifies tokens",
    "ForQuestionAnswering": "it marks answers in texts",
    "ForMaskedLM": "it is an encoder that fills gaps",
    "ForImageClassification": "it classifies images",
    "ForSpeechSeq2Seq": "it writes down speech",
    "ForBlockDiffusion": "it is a diffusion model, which does not write one token after the other",
    "EncoderModel": "it is an encoder",
    "Model": "it has no head for text, so it only computes embeddings",
}
"""What classes with such names are for, the longer endings first."""
_ANOTHER = "serve a model whose class ends in ForCausalLM (docs/reference/models.md)"
_INSTALL = "pip install 'tokenloom[transformers]'"


def check_encoder(path: Path, max_model_len: int | None) -> None:
    """Raise ``ValueError`` for an encoder that no class of the installed transformers computes."""
    name, values = read_model(path)
    if name == STATIC:
        return
    file, types, kind = described_by(path), transformers_types(), str(values.get("model_type"))
    if not is_class_of_transformers(name):
        raise ValueError(f"{file}: {_unknown(name, values, has_transformers=bool(causal_classes()))}")
    if values.get(ENTRY):
        raise ValueError(f"{file}: {ENTRY} is not supported for embeddings of {name}")
    if types is None:
        return
    entries = _text_entries(values)
    # Files also state entries that the class does not read, such as the activation_function (swiglu) of Nomic.
    read = {each for names in types["strict"].get(kind, {}).values() for each in names.split()} or set(entries)
    known = {each: value for each, value in entries.items() if each in read or each in ROPES}
    if wrong := _unknown_value(types["values"], known) or _wrong_entry(types, values):
        raise ValueError(f"{file}: {wrong}")
    if kind in types["lengths"]:
        padding = entries.get("pad_token_id", types["paddings"].get(kind)) if kind in types["paddings"] else None
        check_context(
            max_model_len,
            longest_context(entries, types["lengths"][kind], None) - (0 if padding is None else padding + 1),
        )


def check_causal(path: Path, config: EngineConfig, lack: UnsupportedError | None) -> int | None:
    """Return the tokens of a chunk of the layers that keep a state between tokens, 0 if none does; None: the engine
    decides whether the model is served. ``lack``: why no built-in code computes it, though that has its class. Raises
    ``ValueError`` if transformers' modules do not compute the checkpoint with these options."""
    name, values = read_model(path)
    file, types = described_by(path), transformers_types()
    classes = frozenset(causal_classes().values())
    if name not in classes:
        raise ValueError(f"{file}: {_unknown(name, values, has_transformers=bool(classes))}")
    own, reason = _answer(types, values, name)
    if reason not in ("", UNTRIED):
        first = "" if lack is None else f"{lack}; transformers' modules do not compute it either: "
        raise ValueError(
            f"{first}{file}: {name} is not supported: it {reason}: use a model of docs/reference/models.md"
        )
    scheme_for_modules(path)
    if types is not None and (wrong := _wrong_entry(types, values)):
        raise ValueError(f"{file}: {wrong}")
    if types is None or own != name or reason == UNTRIED:
        return None
    kind, entries = str(values["model_type"]), _text_entries(values)
    if kind in types["lengths"] or _states_context(entries):
        length = longest_context(entries, types["lengths"].get(kind, 0), config.max_model_len)
        check_context(config.max_model_len, length)
        config.check_whole_prompts(length)
    if wrong := _unknown_value(types["values"], entries):
        raise ValueError(f"{file}: {wrong}")
    return types["states"].get(kind, 0)


def drafted_model(path: Path, config: EngineConfig) -> DraftedModel:
    """Return what the files of a model that transformers' modules compute say about drafts for it. Raises
    ``ValueError``."""
    values, types = read_model(path)[1], transformers_types()
    kind, entries = str(values.get("model_type")), _text_entries(values)
    vocab, hidden = (size if type(size := entries.get(name)) is int else None for name in ("vocab_size", "hidden_size"))
    lengths = {} if types is None else types["lengths"]
    length = None
    if kind in lengths or _states_context(entries):
        length = longest_context(entries, lengths.get(kind, 0), config.max_model_len)
    return DraftedModel("transformers", read_dtype(path, config.worker.dtype), vocab, hidden, length)


def check_division(path: Path, place: RankPlace) -> None:
    """Raise ``ValueError`` naming what transformers' modules do not divide among several workers."""
    name, values = read_model(path)
    kind, types, file = str(values.get("model_type")), transformers_types(), described_by(path)
    if place.prefill_size > 1:
        raise ValueError("prefill_context_parallel_size: transformers' modules divide no prompts; leave it out")
    if place.spreads_context and len(_kv_head_counts(path)) > 1:
        raise ValueError(f"{file}: {name} {HEADS_DIFFER}")
    if place.data_size > 1 or place.spreads_experts:
        raise ValueError("enable_expert_parallel: experts of transformers' modules are not spread; leave it out")
    if is_gguf(path) or ENTRY in values:
        raise ValueError(f"{file}: weights in few bits of transformers' modules are not divided; use one worker")
    if types is None or types["types"].get(kind, ("", UNTRIED))[1]:
        return  # the engine asks the class, or it is refused anyway
    if kind in types["states"]:
        raise ValueError(f"{file}: {name} keeps a state between tokens, which is not divided; use one worker")
    size, entries = place.tensor_size, _text_entries(values)
    if size > 1 and kind not in types["divided"]:
        raise ValueError(f"{file}: {name} has no tensor-parallel plan in transformers: leave out tensor_parallel_size")
    if place.num_stages > 1 and kind not in types["staged"]:
        raise ValueError(f"{file}: {name} has no pipeline plan in transformers: leave out pipeline_parallel_size")
    layers = next((count for entry in _LAYERS if isinstance(count := entries.get(entry), int)), place.num_stages)
    if place.num_stages > layers:
        raise ValueError(f"pipeline_parallel_size: {place.num_stages} stages for {layers} layers")
    for entry in types["divided"].get(kind, ()):
        if isinstance(count := entries.get(entry), int) and count % size:
            raise ValueError(f"{file}: tensor_parallel_size {size} does not divide {entry} {count}")


_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads")
"""What Gemma 4 and MiMo-V2 call the KV heads of layers of each kind."""


def check_kv_heads(path: Path, dtype: str) -> None:
    """Raise ``ValueError`` if blocks of this dtype cannot be read as those of layers with fewer heads."""
    if dtype == "int8" and len(_kv_head_counts(path)) > 1:
        raise ValueError(NO_INT8_SHAPES)


def _kv_head_counts(path: Path) -> set[int]:
    """Return how many KV heads layers of each kind have."""
    entries = _text_entries(read_model(path)[1])
    heads = {count for name in _KV_HEADS if isinstance(count := entries.get(name), int)}
    return heads if entries.get("attention_k_eq_v", True) else set()


def _text_entries(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a model, with those of its text model inside."""
    text = values.get("text_config")
    return values | (text if isinstance(text, dict) else {})


def _answer(types: ModuleTypes | None, values: dict[str, Any], name: str) -> tuple[str, str]:
    """Return the class of a configuration's type, and the reason against it: empty if it is served."""
    kind = str(values.get("model_type"))
    if types is None:
        return "", UNTRIED
    if kind not in types["types"]:  # that of a part, or one that the class has besides
        reasons = [reason for each, reason in types["types"].values() if each == name]
        return name, reasons[0] if reasons and all(reasons) else UNTRIED
    own, reason = types["types"][kind]
    entries = _text_entries(values)
    for entry, value, why in types["unless"].get(kind, ()):
        if entries.get(entry) is value:
            reason = reason or f"has {entry} = {json.dumps(value)}, with which it {why}"
    return own, reason


def _unknown_value(known: dict[str, list[str]], entries: dict[str, Any]) -> str:
    """Return which entry has a value that the library does not compute; empty: none has."""
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        if isinstance(found := entries.get(name), str) and found not in known["activation"]:
            return f"{name} {found!r} is not supported: must be one of {', '.join(known['activation'])}"
    for name in ROPES:
        ropes: dict[str, Any] = found if isinstance(found := entries.get(name), dict) else {}
        for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in known["rope_type"]:
                return f"{name}: rope_type {kind!r} is not supported: must be one of {', '.join(known['rope_type'])}"
    return ""


def _states_context(entries: Mapping[str, Any]) -> bool:
    """Return whether neither a length nor the stretching of positions is left to the defaults of the class."""
    return any(entries.get(name) for name in LENGTHS) and any(entries.get(name) for name in ROPES)


_HEAD_SIZES = ("head_dim", "num_attention_heads", "num_key_value_heads")
_SIZES = ("vocab_size", "hidden_size", "true_hidden_size", "intermediate_size", "num_hidden_layers", *_HEAD_SIZES)

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _wrong_entry(types: ModuleTypes, values: Mapping[str, Any]) -> str:
    """Return which entry the class of a type's configuration refuses, and why; empty: none that is known."""
    kind = str(values.get("model_type"))
    for accepted, names in types["strict"].get(kind, {}).items():
        for name in names.split():
            if name in values and _json_kind(values[name]) not in accepted.split():
                wanted = accepted.replace(" ", " or ")
                return f"{name} must be {wanted} for the model type {kind}, found {brief(values[name])}"
    if not isinstance(values.get(ENTRY, {}), dict | None):
        return f"{ENTRY} must be an object, found {brief(values[ENTRY])}"
    for name in ("dtype", "torch_dtype"):
        if values.get(name) is not None and values[name] not in types["values"]["dtype"]:
            return f"{name} must name a dtype of PyTorch, such as bfloat16, found {brief(values[name])}"
    if size := next((name for name in _SIZES if type(values.get(name)) is int and values[name] < 1), None):
        return f"{size} must be a positive integer, found {values[size]}"
    if layers := next((name for name in _LAYERS if type(values.get(name)) is int and values[name] > MOST_LAYERS), None):
        return f"{layers} must be at most {MOST_LAYERS}, found {values[layers]}"
    text = values.get("text_config")
    wrong = _wrong_entry(types, text) if isinstance(text, dict) else ""
    return f"text_config: {wrong}" if wrong else _wrong_together(types, kind, values)


def _wrong_together(types: ModuleTypes, kind: str, values: Mapping[str, Any]) -> str:
    """Return which entries the class refuses because of each other; empty: none that is known."""
    rules = {rule for rule, kinds in types["rules"].items() if kind in kinds}
    size, heads, layers = (values.get(name) for name in ("hidden_size", "num_attention_heads", "layer_types"))
    if "heads" in rules and size and heads and size % heads:
        return f"hidden_size {size} must be a multiple of num_attention_heads {heads}"
    if layers is None or "layer kinds" not in rules:
        return ""
    if not isinstance(layers, list) or any(layer not in types["values"]["layer_types"] for layer in layers):
        return f"layer_types must list kinds of layers that transformers has, found {brief(layers)}"
    count = next((values[name] for name in _LAYERS if name in values), len(layers))
    if "layer count" in rules and len(layers) != count:
        return f"layer_types must name a kind for each of {count} layers, found {brief(layers)}"
    return ""


def _json_kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _unknown(name: str, values: dict[str, Any], *, has_transformers: bool) -> str:
    """Return why a class is refused that transformers does not list as a causal language model."""
    if values.get("is_encoder_decoder") is True:
        return f"{name} has an encoder and a decoder, which is not supported: {_ANOTHER}"
    if name in BUILT_IN:
        return f"{name} is not one of transformers' causal language models: leave out --model-impl transformers"
    if values.get("auto_map"):
        return (
            f"the code of {name} is in the checkpoint (auto_map) and is never run: use a model of "
            "docs/reference/models.md"
        )
    if not name.endswith(_CAUSAL):
        purpose = next((text for ending, text in _OTHER_TASKS.items() if name.endswith(ending)), "it writes no text")
        return f"{name} cannot be served ({purpose}): {_ANOTHER}"
    if not has_transformers:
        return f"{name} is computed by the package transformers: {_INSTALL}"
    return (
        f"neither Tokenloom nor the installed transformers has {name}: use a model of docs/reference/models.md, or "
        "install a newer transformers if that has the class"
    )
