"""Answers how a checkpoint is served, or why not, from its configuration and the heads of its files. It imports neither
torch nor transformers, so that checks before a start, ``tokenloom models`` and the engine all call the one function.

To add to what is served:

- A family: ``files.architectures`` says how.
- A class with a model of text among other parts: a row of ``files.text_part.WRAPPERS``, and what is there to skip.
- A quantization method: ``quantization.entries`` says how. An architecture of GGUF: ``gguf.config``.
- A refusal: ``reader.error`` or ``reader.unsupported`` where the entry is read, so that no option or class escapes it.
  ``unsupported`` leaves the model to transformers' modules where their class reads the entry.
- A class outside of this tree: a plugin (``docs/use/plugins.md``). Only the engine imports it; here its name is known.
- What transformers' modules serve is data, which ``make models-docs`` writes and ``module_types`` reads.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.model_files.sentence_texts import read_sentence_texts
from tokenloom.process.plugins import find_package

from ..parallel.sharding import place_of
from . import module_types
from .draft_config import (
    DraftedModel,
    check_draft,
    check_draft_dtype,
    check_head,
    mtp_names,
    read_eagle3,
    refuse_modules,
    refuse_states,
)
from .encoder_config import EncoderConfig, check_parts, read_encoder_config
from .files.architectures import ARCHITECTURES, BUILT_IN, DECODERS, ENCODERS, WITHOUT_MODULES, is_encoder
from .files.config_reader import (
    IS_CAUSAL,
    UnsupportedError,
    listed_classes,
    read_media,
    read_wrapper,
    stored_names,
)
from .gguf.config import described_by, read_model
from .load_config import check_quantization, load_model_config, read_dtype
from .local_config import (
    LIBRARIES,
    NO_ADAPTERS,
    check_attention,
    check_batch_invariant,
    check_chunks,
    check_device_options,
    check_kv_dtype,
    check_options,
    local_config,
    state_prompts,
)
from .mixer_config import check_state_prompts, with_prompts
from .model_config import ModelConfig
from .rope_config import check_context

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


def _device_kind(worker: WorkerConfig, *, has_gpu: bool) -> str:
    """Return the kind of device on which the model will compute, as far as that is known."""
    if not has_gpu or worker.device == "cpu":
        return "cpu"
    return "xpu" if worker.device == "xpu" else "cuda"


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
    kind = _device_kind(worker, has_gpu=has_gpu)
    check_device_options(config, kind)
    check_options(config)
    config.check_core_place()
    impl = chosen_impl(config)
    if ":" in impl:
        _check_plugged(config, impl)
    found = choose(path, worker.dtype, worker.quantization, impl, config.max_model_len)
    if isinstance(found.config, ModelConfig):
        model = with_prompts(found.config, state_prompts(config, kind))
        found = replace(found, config=model, state_chunk=0 if model.states is None else model.states.chunk)
    if found.by != "plugin" and worker.state_prompts != "auto" and (found.by == "transformers" or found.state_chunk):
        check_state_prompts(found.config if isinstance(found.config, ModelConfig) else None, worker.state_prompts)
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
    if worker.cpu_offload_gb and found.by in ("transformers", "encoder"):
        raise ValueError("cpu_offload_gb: transformers' modules and encoders keep all weights on the GPU: leave it out")
    if worker.attention_backend in LIBRARIES and found.by == "transformers":
        raise ValueError(
            f"attention_backend {worker.attention_backend}: transformers' modules choose the scores of their layers, "
            "which it may not know; choose auto"
        )
    if found.by == "transformers":
        if not place.is_whole:
            module_types.check_division(path, place)
        module_types.check_kv_heads(path, config.cache.dtype)
        chunk = module_types.check_causal(path, config, found.lack)
        found = replace(found, is_tried=False) if chunk is None else replace(found, state_chunk=chunk)
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
        module_types.check_encoder(path, config.max_model_len)
        return found
    if isinstance(found.config, ModelConfig):
        check_decoder(config, found.config)
        if found.config.cross_rows:
            config.check_cross()
            if has_gpu and worker.device != "cpu":
                raise ValueError(f"{path}: models that transcribe sound do not run on a GPU yet: choose --device cpu")
        if worker.batch_invariant:
            check_batch_invariant(config, found.config)
    else:
        check_context(config.max_model_len, found.config.max_model_len)
    return found


def check_decoder(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` naming an option that a decoder, whole, does not have."""
    local_config(model, place_of(config.parallel))
    check_kv_dtype(model, config.cache.dtype)
    check_chunks(model, config.cache.block_size)
    check_attention(config, model)
    config.check_states(0 if model.states is None else model.states.chunk)
    check_context(config.max_model_len, model.max_model_len)
    config.check_whole_prompts(model.max_model_len)


def check_plugged(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` naming an option that a plugin's architecture does not have: what :func:`served_how` cannot
    know, because it imports no plugin. ``model``: the whole, as the plugin reads it."""
    check_decoder(config, model)
    if config.lora.enable and _is_gpt2(model):
        raise ValueError(f"{NO_ADAPTERS}; its architecture is not supported")
    if config.speculative is not None:
        _check_drafts(config, Path(config.worker.model), ServedHow("plugin", model))


def divides_kv(config: ModelConfig) -> bool:
    """Return whether the layers of a model can divide keys and values by the numbers of a checkpoint: not those with
    compressed vectors, those that use the keys of another layer, and those whose norm has no weights and comes behind
    the rotation (Llama 4): it would undo the division of keys."""
    is_plain = config.latent is None and not config.kv_sources
    return is_plain and config.family in DECODERS and not config.traits.is_interleaved


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
    drafted: ModelConfig | DraftedModel | None = target
    if found.by == "transformers":
        drafted = module_types.drafted_model(path, config)
    if drafted is not None:
        check_draft(draft, drafted)
        if speculative.method == "eagle":
            check_head(draft, drafted)


def _draft_config(worker: WorkerConfig, drafting: Path, max_model_len: int | None) -> ModelConfig:
    """Return the configuration of a draft model or an EAGLE head. Raises ``ValueError`` if it cannot draft."""
    kind, types = str(read_model(drafting)[1].get("model_type")), module_types.transformers_types()
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
    :func:`~..models.load_model.load_model`. Raises ``ValueError``."""
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
        known = module_types.known_entries(path)
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


def _check_dtype(path: Path, dtype: str) -> None:
    """Raise ``ValueError`` for a dtype that is not computed, unless only the weights state it."""
    values = read_model(path)[1]
    if dtype != "auto" or values.get("dtype") or values.get("torch_dtype"):
        read_dtype(path, dtype)
