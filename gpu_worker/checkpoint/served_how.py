"""Answers how a checkpoint is served, or why not, from its configuration and the heads of its files. It imports neither
torch nor transformers, so that checks before a start, ``tokenloom models`` and the engine all call the one function.

To add to what is served:

- A family: its class in ``files.supported.ARCHITECTURES`` and its ``DecoderTraits`` there; what they cannot state is
  read in ``load_config``. Its layers are ``models.decoder``'s, or a module beside it.
- A class with a model of text among other parts: a row of ``files.text_part.WRAPPERS``, and what is there to skip.
- A quantization method: ``quantization.entries`` says how. An architecture of GGUF: ``gguf.config``.
- A refusal: ``reader.error`` or ``reader.unsupported`` where the entry is read, so that no option or class escapes it.
  ``unsupported`` leaves the model to transformers' modules where their class reads the entry.
- A class outside of this tree: a plugin (``docs/use/plugins.md``). Only the engine imports it; here its name is known.
- What transformers' modules serve is data: ``transformers_types.json``, written by ``make models-docs`` for the
  installed version. Another version is not known here: the answer is ``untried``, and the engine decides.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypedDict

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.model_files.sentence_texts import read_sentence_texts
from tokenloom.process.plugins import find_package

from ..parallel.sharding import RankPlace, place_of
from .draft_config import (
    check_draft,
    check_draft_dtype,
    check_head,
    mtp_names,
    read_eagle3,
    refuse_modules,
    refuse_states,
)
from .encoder_config import EncoderConfig, check_parts, read_encoder_config
from .files.config_reader import (
    IS_CAUSAL,
    MOST_LAYERS,
    UnsupportedError,
    brief,
    causal_classes,
    is_class_of_transformers,
    listed_classes,
    read_media,
    read_wrapper,
    stored_names,
)
from .files.supported import ARCHITECTURES, BUILT_IN, ENCODERS, STATIC, WITHOUT_MODULES, is_encoder
from .gguf.config import described_by, read_model
from .load_config import check_quantization, load_model_config, read_dtype
from .local_config import (
    HEADS_DIFFER,
    NO_ADAPTERS,
    NO_INT8_SHAPES,
    check_batch_invariant,
    check_chunks,
    check_device_options,
    check_kv_dtype,
    check_options,
    local_config,
)
from .model_config import ModelConfig
from .quantization.entries import ENTRY, scheme_for_modules
from .rope_config import LENGTHS, ROPES, longest_context

By = Literal["built in", "encoder", "transformers", "plugin"]
"""What computes a checkpoint: the built-in decoders, an encoder, transformers' modules over the KV cache, or a plugin
that says how its class is read."""


@dataclass(frozen=True)
class ServedHow:
    """Says what computes a checkpoint."""

    by: By
    config: ModelConfig | EncoderConfig | None = None
    """What the built-in code reads; None: transformers' modules compute it, or only the engine reads it, by a
    plugin."""
    lack: UnsupportedError | None = None
    """What the built-in code lacks, though it has the class."""
    is_tried: bool = True
    """Whether the answer was found for this version of transformers; otherwise the engine decides."""
    state_chunk: int = 0
    """The tokens of a chunk of the layers that keep a state between tokens; 0: none does, or only the engine knows."""


_UNORDERED = {
    "encoder": "encoders",
    "transformers": "transformers' modules, which compute this model,",
    "plugin": "architectures of plugins may",
}


def served_how(config: EngineConfig, *, has_gpu: bool) -> ServedHow:
    """Return what computes the checkpoint ``config.worker.model``, a directory or GGUF file, with these options.

    ``has_gpu``: whether this machine has a GPU that PyTorch can use, or may have. Raises ``ValueError``, whose message
    is one sentence that names what cannot be served and what would be.
    """
    worker, path = config.worker, Path(config.worker.model)
    if worker.device == "cuda" and not has_gpu:
        raise ValueError("device cuda: PyTorch finds no GPU on this machine; choose cpu, or leave the option out")
    check_device_options(config, "cuda" if has_gpu and worker.device != "cpu" else "cpu")
    check_options(config)
    config.check_core_place()
    impl = chosen_impl(config)
    if ":" in impl:
        _check_plugged(config, impl)
    found = choose(path, worker.dtype, worker.quantization, impl, config.max_model_len)
    if not is_gguf(path) and (name := read_wrapper(path)) is not None and not worker.language_model_only:
        _check_media(path, name, found, spreads_context=place_of(config.parallel).spreads_context)
    if worker.load_format == "dummy":
        check_dummy(path, found)
    elif worker.load_format != "auto" and (is_gguf(path) or found.by not in ("built in", "plugin")):
        raise ValueError(
            f"load_format {worker.load_format} reads weights for the built-in architectures of a directory with "
            f"config.json; {path} is a GGUF file, an encoder, or transformers' modules compute it"
        )
    if worker.runner != "generate":
        _check_sentence_files(path)
    elif not _generates(found):
        raise ValueError("runner is generate, but this model generates no text; choose auto or pooling")
    if found.config is None:
        _check_dtype(path, worker.dtype)
    if config.speculative is not None:
        _check_drafts(config, path, found)
    place = place_of(config.parallel)
    if worker.batch_invariant and found.by != "built in":
        raise ValueError(f"batch_invariant: {_UNORDERED[found.by]} follow the batch")
    if found.by == "transformers":
        if not place.is_whole:
            _check_division(path, place)
        _check_kv_heads(path, config.cache.dtype)
        found = _by_transformers(path, found, config)
        if found.is_tried:
            config.check_states(found.state_chunk)
        if config.lora.enable and found.state_chunk:
            raise ValueError(f"{NO_ADAPTERS}: transformers' modules keep states in it")
        if config.lora.enable and place.tensor_size > 1 and worker.quantization in ("int8-dynamic", "fp8"):
            raise ValueError(
                f"enable_lora: transformers' modules have no adapters over several workers with {worker.quantization}: "
                "leave out one of them"
            )
        return found
    if config.lora.enable and (found.by == "encoder" or _is_gpt2(found.config)):
        raise ValueError(f"{NO_ADAPTERS}; its architecture is not supported")
    if found.by == "plugin":
        return found
    if found.by == "encoder":
        config.check_encoder()
        check_parts(found.config if isinstance(found.config, EncoderConfig) else None, place, read_model(path)[0])
    if found.config is None:
        _check_module_encoder(path, config.max_model_len)
        return found
    if isinstance(found.config, ModelConfig):
        check_decoder(config, found.config)
        if found.config.cross_rows:
            config.check_cross()
            if has_gpu and worker.device != "cpu":
                raise ValueError(
                    f"{path}: models that write down sound are computed on CPUs only yet: choose --device cpu"
                )
        if worker.batch_invariant:
            check_batch_invariant(config, found.config)
    else:
        _check_context(config.max_model_len, found.config.max_model_len)
    return found


def check_decoder(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` naming an option that a decoder, whole, does not have."""
    local_config(model, place_of(config.parallel))
    check_kv_dtype(model, config.cache.dtype)
    check_chunks(model, config.cache.block_size)
    config.check_states(0 if model.states is None else model.states.chunk)
    _check_context(config.max_model_len, model.max_model_len)
    config.check_whole_prompts(model.max_model_len)


def check_plugged(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` naming an option that a plugin's architecture does not have: what :func:`served_how` cannot
    know, because it imports no plugin. ``model``: the whole, as the plugin reads it."""
    check_decoder(config, model)
    if config.lora.enable and _is_gpt2(model):
        raise ValueError(f"{NO_ADAPTERS}; its architecture is not supported")
    if config.speculative is not None:
        _check_drafts(config, Path(config.worker.model), ServedHow("plugin", model))


def chosen_impl(config: EngineConfig) -> str:
    """Return ``model_impl`` of an engine, with a plugin in the place of ``auto`` if one of its packages declares the
    class that the checkpoint names, and nothing built in has that. No plugin is imported. Raises ``ValueError``."""
    worker, path = config.worker, Path(config.worker.model)
    if worker.model_impl != "auto" or not config.plugins or is_gguf(path):
        return worker.model_impl
    names = listed_classes(path)
    if not BUILT_IN.isdisjoint(names):
        return "auto"
    points = [(name, point.name) for name in config.plugins for point in find_package(name).of_kind(_PLUGGED)]
    found = [f"{package}:{name}" for package, name in points if name in names]
    if len(found) > 1:
        raise ValueError(f"the plugins {' and '.join(found)} both compute {path}: name one of them with --model-impl")
    return found[0] if found else "auto"


_PLUGGED = "model_architectures"


def names_class(path: Path, impl: str) -> bool:
    """Return whether a checkpoint is of the class that a plugin ``PACKAGE:CLASS`` declares."""
    return not is_gguf(path) and impl.partition(":")[2] in listed_classes(path)


def _check_plugged(config: EngineConfig, impl: str) -> None:
    """Raise ``ValueError`` if a plugin does not declare the checkpoint's class, or for what no such class has."""
    path, speculative = Path(config.worker.model), config.speculative
    if not names_class(path, impl):
        found = "a GGUF file" if is_gguf(path) else f"of the class {', '.join(listed_classes(path)) or 'of no name'}"
        raise ValueError(f"model_impl: {impl} computes {impl.partition(':')[2]}, and {path} is {found}; choose auto")
    if config.worker.load_format == "dummy":
        raise ValueError(f"load_format dummy makes weights for the built-in architectures; {impl} computes {path}")
    if speculative is not None and speculative.method == "mtp":
        raise ValueError(
            f"speculative_config: the method mtp reads the head in the files of built-in architectures, and {impl} has "
            "its own: choose ngram, suffix, draft_model, eagle or eagle3"
        )


def _is_gpt2(config: object) -> bool:
    """Return whether a decoder stores its layers as [inputs, outputs], which no adapter changes."""
    return isinstance(config, ModelConfig) and config.family == "gpt2"


def _check_drafts(config: EngineConfig, path: Path, found: ServedHow) -> None:
    """Raise ``ValueError`` if what drafts cannot, as far as configurations and the heads of files say."""
    speculative, target = config.speculative, found.config if isinstance(found.config, ModelConfig) else None
    assert speculative is not None
    if speculative.method == "mtp":
        head = f"{mtp_names(target).joins}.weight"
        if is_gguf(path) or head not in stored_names(path):
            raise ValueError(f"speculative_config: {path} has no tensor {head}, the head of the method mtp")
    drafting = Path(speculative.model)
    if not speculative.has_files or not (is_gguf(drafting) or (drafting / "config.json").is_file()):
        return
    if speculative.method == "eagle3":
        entries = read_eagle3(drafting, config.worker.dtype)
        if target is None and found.by == "plugin":
            return  # the engine checks it, by check_plugged
        if target is None:
            raise ValueError("speculative_config: the method eagle3 drafts for models with built-in layers only")
        entries.layers_of(target)
        check_draft_dtype(entries.config, target)
        return
    draft = _draft_config(config.worker, drafting, config.max_model_len)
    if target is not None:
        check_draft(draft, target)
        if speculative.method == "eagle":
            check_head(draft, target)


def _draft_config(worker: WorkerConfig, drafting: Path, max_model_len: int | None) -> ModelConfig:
    """Return the configuration of a draft model or an EAGLE head. Raises ``ValueError`` if it cannot draft."""
    kind, types = str(read_model(drafting)[1].get("model_type")), transformers_types()
    if kind in (types["states"] if types is not None else ()):
        raise refuse_states(drafting.name)
    draft = choose(drafting, worker.dtype, worker.quantization, max_model_len=max_model_len)
    if not isinstance(draft.config, ModelConfig):
        raise refuse_modules(drafting.name)
    if draft.state_chunk:
        raise refuse_states(drafting.name)
    return draft.config


def _check_media(path: Path, name: str, found: ServedHow, *, spreads_context: bool) -> None:
    """Raise ``ValueError`` if prompts of a class that reads images or sound cannot have any."""
    media, why = read_media(path), ""
    if media is None:
        why = "reads images or sound, which is not supported"
    elif found.by == "transformers" and (media.axes or media.levels > 1):
        why = "is computed by transformers' modules, of which those of its text take no images"
    elif spreads_context and media.seen_whole:
        why = "lets tokens of an image see later ones, which is not supported with decode_context_parallel_size"
    if why:
        raise ValueError(
            f"{path / 'config.json'}: {name} {why}: serve its text alone with --language-model-only "
            "(language_model_only=True of LLM)"
        )


def choose(
    path: Path,
    dtype: str = "auto",
    quantization: str | None = None,
    model_impl: str = "auto",
    max_model_len: int | None = None,
) -> ServedHow:
    """Return what computes a checkpoint, as far as its configuration says; the arguments are those of
    :func:`~..models.architectures.load_model`. Raises ``ValueError``."""
    check_quantization(quantization)
    if ":" in model_impl:
        if names_class(path, model_impl):
            return ServedHow("plugin")
        model_impl = "auto"  # a checkpoint of another class, which drafts
    name, values = read_model(path)
    if is_gguf(path) and model_impl == "transformers" and name in BUILT_IN:
        raise ValueError(f"{path}: transformers' modules read no GGUF file of {name}; choose model_impl auto")
    if type(values.get(IS_CAUSAL, True)) is not bool:
        raise ValueError(f"{described_by(path)}: {IS_CAUSAL} must be true or false, found {values[IS_CAUSAL]}")
    if is_encoder(name, values):
        return ServedHow("encoder", read_encoder_config(path, dtype) if name in ENCODERS else None)
    if model_impl == "transformers" or (model_impl == "auto" and name not in BUILT_IN):
        return ServedHow("transformers")
    if name not in BUILT_IN:
        raise ValueError(
            f"{described_by(path)}: {name} is not built in: leave out --model-impl native, or see "
            "docs/reference/models.md"
        )
    try:
        read = load_model_config(path, dtype, quantization, max_model_len)
        return ServedHow("built in", read, state_chunk=0 if read.states is None else read.states.chunk)
    except UnsupportedError as lack:
        if model_impl == "native" or name not in ARCHITECTURES or name in WITHOUT_MODULES:
            raise
        known = _known_entries(path)
        if known is not None and not known.issuperset(lack.unread):
            raise
        return ServedHow("transformers", lack=lack, is_tried=known is not None)


def _generates(found: ServedHow) -> bool:
    config = found.config
    return found.by != "encoder" and not (
        isinstance(config, ModelConfig) and (config.has_class_head or not config.has_output)
    )


def _check_sentence_files(path: Path) -> None:
    try:
        read_sentence_texts(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_dummy(path: Path, found: ServedHow) -> None:
    """Raise ``ValueError`` if random weights cannot stand for those of the model."""
    if is_gguf(path) or found.by != "built in":
        raise ValueError(
            f"load_format dummy makes weights for the built-in architectures of a directory with config.json; {path} "
            "is a GGUF file, an encoder, or transformers' modules compute it"
        )
    scheme = found.config.scheme if isinstance(found.config, ModelConfig) else None
    if scheme is not None:
        raise ValueError(
            f"load_format dummy makes no weights that are quantized as {scheme.name}: leave quantization_config out of "
            "config.json, or choose --quantization"
        )


def _check_context(wanted: int | None, length: int) -> None:
    if wanted is not None and not 2 <= wanted <= length:
        raise ValueError(
            f"max_model_len {wanted}: the model's context has {length} tokens: give at most that and at least 2 (one "
            "token of prompt, one of output), or leave out the option"
        )


class _Types(TypedDict):
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
def transformers_types() -> _Types | None:
    """Return what was found for the installed version of transformers; None: it is another one, or not installed."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
    types: _Types | None = json.loads(TYPES_FILE.read_text(encoding="utf-8")).get(version)
    return types


def _known_entries(path: Path) -> frozenset[str] | None:
    """Return the entries that transformers' class knows; None: that is not known here."""
    types, kind = transformers_types(), str(read_model(path)[1].get("model_type"))
    return frozenset(types["entries"][kind]) if types is not None and kind in types["entries"] else None


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_TASKS = {
    "Qwen2_5OmniModel": "it reads images, sound and video, and speaks",
    "UltravoxModel": "it reads sound",
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


def _check_dtype(path: Path, dtype: str) -> None:
    """Raise ``ValueError`` for a dtype that is not computed, unless only the weights state it."""
    values = read_model(path)[1]
    if dtype != "auto" or values.get("dtype") or values.get("torch_dtype"):
        read_dtype(path, dtype)


def _check_module_encoder(path: Path, max_model_len: int | None) -> None:
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
        _check_context(
            max_model_len,
            longest_context(entries, types["lengths"][kind], None) - (0 if padding is None else padding + 1),
        )


def _by_transformers(path: Path, found: ServedHow, config: EngineConfig) -> ServedHow:
    """Return the answer for a checkpoint that only transformers' modules may compute. Raises ``ValueError``."""
    name, values = read_model(path)
    file, types = described_by(path), transformers_types()
    classes = frozenset(causal_classes().values())
    if name not in classes:
        raise ValueError(f"{file}: {_unknown(name, values, has_transformers=bool(classes))}")
    own, reason = _answer(types, values, name)
    if reason not in ("", UNTRIED):
        lack = "" if found.lack is None else f"{found.lack}; transformers' modules do not compute it either: "
        raise ValueError(f"{lack}{file}: {name} is not supported: it {reason}: use a model of docs/reference/models.md")
    scheme_for_modules(path)
    if types is not None and (wrong := _wrong_entry(types, values)):
        raise ValueError(f"{file}: {wrong}")
    if types is None or own != name or reason == UNTRIED:
        return ServedHow("transformers", lack=found.lack, is_tried=False)
    kind, entries = str(values["model_type"]), _text_entries(values)
    if kind in types["lengths"] or _states_context(entries):
        length = longest_context(entries, types["lengths"].get(kind, 0), config.max_model_len)
        _check_context(config.max_model_len, length)
        config.check_whole_prompts(length)
    if wrong := _unknown_value(types["values"], entries):
        raise ValueError(f"{file}: {wrong}")
    return replace(found, state_chunk=types["states"].get(kind, 0))


def _check_division(path: Path, place: RankPlace) -> None:
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


def _check_kv_heads(path: Path, dtype: str) -> None:
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


def _answer(types: _Types | None, values: dict[str, Any], name: str) -> tuple[str, str]:
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
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *_HEAD_SIZES)

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _wrong_entry(types: _Types, values: Mapping[str, Any]) -> str:
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


def _wrong_together(types: _Types, kind: str, values: Mapping[str, Any]) -> str:
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
