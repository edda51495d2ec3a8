"""Derives the configuration of the part of a model that one rank computes, and refuses options that several ranks, or a
device, do not support."""

import os
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from tokenloom.engine_core.data.config import EngineConfig, KVCacheDtype, ParallelConfig

from ..parallel.sharding import RankPlace, Shard
from .mixer_config import FLA, STATE_CHUNK, StatePrompts, state_layout
from .model_config import ExpertSwitches, MixerSwitches, ModelConfig


def local_config(config: ModelConfig, place: RankPlace) -> ModelConfig:
    """Return the configuration of the rank at ``place``: its heads, its part of the MLPs, its layers.

    Raises ``ValueError`` naming what cannot be divided among the ranks, or is not supported with several.
    """
    if place.prefill_size > 1:
        _check_prefill(config)
    if place.has_whole_model:
        return config if place.samples else replace(config, samples=False)
    _check(config, place)
    size, mixer = place.tensor_size, config.mixer
    layers = place.layers(config.num_layers if mixer is None else len(mixer.layers))
    of_all = mine = slice(layers.start, layers.stop)
    states = None
    if mixer is not None:
        mine = _attending(mixer, layers, config.num_layers)
        mixer = _local_mixer(mixer, size, of_all)
        states = state_layout(mixer, config.hidden_size // size) if any(mixer.layers) else None
    return replace(
        config,
        num_layers=mine.stop - mine.start,
        num_heads=max(1, config.num_heads // size),
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        ropes=config.ropes[mine],
        attention_scales=config.attention_scales[mine],
        sliding_windows=config.sliding_windows[mine],
        attention_chunks=config.attention_chunks[mine],
        experts=None if config.experts is None else _local_experts(config.experts, place, of_all),
        mixer=mixer,
        states=states,
        shard=Shard(place.tensor_rank, size, config.num_kv_heads, place.spreads_context, place.cuts_vocabulary),
        first_layer=layers.start,
        layers_of_model=config.num_layers if config.mixer is None else len(config.mixer.layers),
        is_last_stage=place.stage == place.num_stages - 1,
        samples=place.samples,
        is_copy=place.prefill_rank > 0,
    )


def _attending(mixer: MixerSwitches, layers: range, num_layers: int) -> slice:
    """Return which of the layers that attend are among ``layers``; where none is, one whose cache is never used."""
    first = min(mixer.num_attending(layers.start), num_layers - 1)
    return slice(first, max(mixer.num_attending(layers.stop), first + 1))


def _local_mixer(mixer: MixerSwitches, size: int, layers: slice) -> MixerSwitches:
    groups = max(1, mixer.groups // size) if mixer.groups else 0
    return replace(
        mixer,
        heads=mixer.heads // size,
        groups=groups,
        all_groups=mixer.groups,
        layers=mixer.layers[layers],
        mlps=mixer.mlps[layers],
    )


def check_options(config: EngineConfig) -> None:
    """Raise ``ValueError`` naming an option that is not supported with several workers."""
    parallel = config.parallel
    if (context := parallel.decode_context_parallel_size) not in (1, parallel.tensor_parallel_size):
        raise ValueError(
            f"decode_context_parallel_size: must be 1 or tensor_parallel_size, {parallel.tensor_parallel_size}, "
            f"not {context}"
        )
    _check_balancing(parallel)
    if parallel.prefill_context_parallel_size > 1:
        _check_divided_prompts(config)
    if config.worker.batch_invariant:
        _check_order(config)
    if config.cache.block_size % context:
        raise ValueError(f"block_size: {config.cache.block_size} tokens cannot be spread evenly over {context} workers")


def _check_divided_prompts(config: EngineConfig) -> None:
    """Raise ``ValueError`` naming what the ranks that divide prompts do not have beside that."""
    parallel, drafts = config.parallel, config.speculative
    moves = [name for name, value in {"kv_transports": config.kv.transports, **config.kv.tiers}.items() if value]
    if drafts is not None and drafts.writes_kv and moves:
        raise ValueError(
            "prefill_context_parallel_size: KV does not move where one worker has the KV of what drafts: leave out "
            f"the method {drafts.method}, or {' and '.join(moves)}"
        )
    others = {
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "enable_expert_parallel over engines": parallel.spreads_experts_over_engines,
        "enable_eplb": parallel.enable_eplb,
    }
    named = [name for name, is_set in others.items() if is_set]
    if named:
        raise ValueError(
            f"prefill_context_parallel_size: is not supported with {' and '.join(named)} yet: leave one of them out"
        )


def _check_prefill(config: ModelConfig) -> None:
    """Raise ``ValueError`` naming what in the model keeps prompts from being divided among ranks."""
    lack = ""
    if config.mixer is not None:
        lack = "layers of this model keep a state, which passes from token to token"
    elif config.cross_rows:
        lack = "this model writes down the sound beside each prompt"
    elif config.has_class_head or not config.has_output:
        lack = "prompts of models that only pool are not divided yet"
    if lack:
        raise ValueError(f"prefill_context_parallel_size: {lack}; leave it out")


def check_kv_dtype(config: ModelConfig, dtype: KVCacheDtype) -> None:
    """Raise ``ValueError`` if the model's KV cache cannot have ``dtype``."""
    if config.kv_shapes and dtype == "int8":
        raise ValueError(NO_INT8_SHAPES)
    if config.latent is not None and dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype: {dtype} is not supported for compressed vectors (MLA), which take a few hundred numbers "
            "a token and layer as they are; leave it out"
        )


_RUN = 16
"""Positions that the kernels of attention take to lie in one block."""
_MOST_GROUPED_HEADS = 32
"""Most query heads that may share a KV head in them."""
_RANKS = 64
"""Elements of compressed vectors that they compute together."""


def kernel_lack(config: ModelConfig, block_size: int) -> str:
    """Return why the C++ kernels do not compute a model's attention over such blocks; empty: they do."""
    latent = config.latent
    if block_size % _RUN:
        return f"block size {block_size} is not a multiple of {_RUN}"
    if latent is not None and (latent.rank % _RANKS or latent.rope_size % 2):
        return f"compressed vectors of {latent.rank} elements are no multiple of {_RANKS}"
    if latent is None and config.num_heads > config.num_kv_heads * _MOST_GROUPED_HEADS:
        return f"more than {_MOST_GROUPED_HEADS} query heads share a KV head"
    return ""


def check_batch_invariant(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` naming what has no order of sums that is the same in every batch."""
    lack = kernel_lack(model, config.cache.block_size)
    if model.has_class_head or not model.has_output:
        lack = "the model writes no text, and it is log probabilities that are kept"
    if lack:
        raise ValueError(f"batch_invariant: {lack}")


def _check_order(config: EngineConfig) -> None:
    """Raise ``ValueError`` naming an option with which the last bits would follow the batch."""
    worker, parallel = config.worker, config.parallel
    several = parallel.world_size > 1 or parallel.spreads_experts_over_engines
    draws = config.speculative is not None and config.speculative.rejection_sample_method == "probabilistic"
    options = {
        f"attention_backend {worker.attention_backend} follows the batch": worker.attention_backend
        not in ("auto", "cpu"),
        "transformers' modules follow the batch: leave out model_impl": worker.model_impl == "transformers",
        "vectors of prompts follow the chunks: choose runner auto or generate": worker.runner == "pooling",
        "probabilistic acceptance changes tokens: choose rejection_sample_method strict": draws,
        "it is not supported with several workers yet; use one worker": several,
    }
    if reason := next((name for name, is_set in options.items() if is_set), None):
        raise ValueError(f"batch_invariant: {reason}")


@dataclass(frozen=True)
class AttentionLibrary:
    """Says what the attention of a library computes over a paged cache, in the dtypes of GPUs' tensor cores."""

    distribution: str
    """What pip installs."""
    head_sizes: tuple[int, ...]
    most_block: int
    """The largest block size."""
    capability: tuple[int, int]
    """Of the first GPUs that it knows."""
    has_sinks: bool
    has_fp8_cache: bool

    @property
    def is_installed(self) -> bool:
        return bool(self.version)

    @property
    def version(self) -> str:
        """Return the version that is installed; empty: none is."""
        try:
            return version(self.distribution)  # to look for a module would import the packages around it
        except PackageNotFoundError:
            return ""


LIBRARIES = {
    "flashinfer": AttentionLibrary(
        "flashinfer-python", (64, 128, 256), 128, (8, 0), has_sinks=False, has_fp8_cache=True
    ),
    # From blocks of 64 tokens on it may load whole tiles, with what an earlier owner has left behind the last token.
    "flash-attn": AttentionLibrary("flash-attn-4", (64, 96, 128), 32, (9, 0), has_sinks=True, has_fp8_cache=False),
}
"""The backends of ``attention_backend`` that are other projects' kernels, by name. Both know windows and limits of
scores (softcap), and no images whose tokens see later ones."""


def library_lack(name: str, config: ModelConfig, cache_dtype: KVCacheDtype, block_size: int) -> str:
    """Return why a library of ``LIBRARIES`` does not compute a model's attention over such a cache; empty: it does."""
    library = LIBRARIES[name]
    if not library.is_installed:
        return f"it needs the package {library.distribution}; install it, or choose auto"
    sizes, shows_later = library.head_sizes, config.media is not None and config.media.seen_whole is not None
    has_dtype = cache_dtype == "auto" or (cache_dtype == "fp8" and library.has_fp8_cache)
    lacks = {
        f"it computes in float16 and bfloat16, not in {config.dtype_name}": config.dtype_name == "float32",
        "it reads no compressed vectors (MLA)": config.latent is not None,
        "it knows layers of one shape only": bool(config.kv_shapes or any(config.attention_chunks)),
        f"it has heads of {', '.join(map(str, sizes))}, not of {config.head_size}": config.head_size not in sizes,
        "it knows no sinks": config.traits.has_sinks and not library.has_sinks,
        "it shows no token of an image later ones": shows_later,
        f"it does not read kv_cache_dtype {cache_dtype}": not has_dtype,
        f"its blocks have at most {library.most_block} tokens, not {block_size}": block_size > library.most_block,
    }
    lack = next((each for each, is_so in lacks.items() if is_so), "")
    return lack and f"{lack}; choose auto"


def check_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ValueError`` if the library that computes attention, if one does, lacks what the model needs."""
    name = config.worker.attention_backend
    if name not in LIBRARIES:
        return
    if config.parallel.decode_context_parallel_size > 1:
        raise ValueError(f"attention_backend {name}: no part of a context is computed by it; choose auto")
    if config.speculative is not None and config.speculative.writes_kv:
        raise ValueError(
            f"attention_backend {name}: the layers of drafts are not computed by it yet: choose auto, or drafts by "
            "ngram or suffix"
        )
    if lack := library_lack(name, model, config.cache.dtype, config.cache.block_size):
        raise ValueError(f"attention_backend {name}: {lack}")


def check_chunks(config: ModelConfig, block_size: int) -> None:
    """Raise ``ValueError`` if blocks of the KV cache would lie across the ends of the model's attention chunks."""
    for chunk in filter(None, config.attention_chunks):
        if chunk % block_size:
            raise ValueError(f"block_size: {block_size} tokens do not divide the model's attention chunks of {chunk}")


NO_ADAPTERS = "enable_lora: no layer of this model can have an adapter"
NO_INT8_SHAPES = (
    "kv_cache_dtype: int8 is not supported for layers with different numbers of KV heads: scales lie behind the "
    "numbers of a block; leave it out"
)
HEADS_DIFFER = (
    "has layers with different numbers of KV heads, which are not spread: leave out decode_context_parallel_size"
)


def check_device_options(config: EngineConfig, kind: str) -> None:
    """Raise ``ValueError`` naming an option that is not supported on a device of this kind, ``cpu`` or ``cuda``."""
    if kind == "cpu":
        check_host(config)
    else:
        check_apart(config, kind)


_TRITON = ("auto", "triton", *LIBRARIES)


def state_prompts(config: EngineConfig, kind: str) -> StatePrompts:
    """Return how a device of this kind computes prompts of layers with a recurrence, if it has Triton's kernels."""
    worker = config.worker
    if worker.state_prompts != "auto":
        return worker.state_prompts
    has_kernels = kind == "cuda" and worker.attention_backend in _TRITON
    return "chunks" if has_kernels and not config.lack_for_chunks(STATE_CHUNK) else "scan"


def _check_state_prompts(config: EngineConfig, kind: str) -> None:
    """Raise ``ValueError`` if a device of this kind cannot compute prompts in the way that is chosen."""
    worker = config.worker
    if (wanted := worker.state_prompts) in ("auto", "scan"):
        return
    if kind != "cuda":
        raise ValueError(f"state_prompts: {wanted} is computed on a GPU (cuda) only: choose scan, or leave it out")
    if worker.attention_backend not in _TRITON:
        raise ValueError(
            f"state_prompts: {wanted} goes with Triton's kernels: leave out attention_backend "
            f"{worker.attention_backend}, or choose scan"
        )
    if wanted == "fla":
        try:
            version(FLA)
        except PackageNotFoundError:
            raise ValueError(f"state_prompts: fla needs the package {FLA}; install it, or choose chunks") from None


def check_host(config: EngineConfig) -> None:
    """Raise ``ValueError`` naming an option that is not supported with KV in the host's memory."""
    _check_state_prompts(config, "cpu")
    if config.worker.dtype == "float16":
        raise ValueError("dtype float16 is computed on a GPU only: choose bfloat16 or float32 on a CPU")
    if config.worker.quantization == "fp8":
        raise ValueError("quantization fp8 is computed on a GPU only: choose int8-dynamic or int4 on a CPU")
    if config.worker.cpu_offload_gb:
        raise ValueError("cpu_offload_gb: the weights of a CPU are in memory of the host: leave it out")
    if config.worker.attention_backend in LIBRARIES:
        raise ValueError(f"attention_backend {config.worker.attention_backend} computes on a GPU only: choose auto")
    _check_processors(config.parallel)
    if config.cache.dtype == "fp8":
        raise ValueError("kv_cache_dtype fp8 is read on a GPU only: choose int8, of the same size, on a CPU")
    if "cuda" in config.kv.transports:
        raise ValueError("kv_transports: cuda moves KV between GPUs: choose shm or socket on a CPU")


_WORKERS_A_PROCESSOR = 4
"""Beyond that the workers of a step wait for each other's turns, and their start takes minutes."""


def _check_processors(parallel: ParallelConfig) -> None:
    if "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):  # which has other machines
        return
    processors = len(os.sched_getaffinity(0))
    if parallel.world_size > _WORKERS_A_PROCESSOR * processors:
        raise ValueError(
            f"{_product(parallel)} is {parallel.world_size} workers: at most {_WORKERS_A_PROCESSOR} share one of the "
            f"{processors} processors that this machine allows; each should have one of its own"
        )


def _product(parallel: ParallelConfig) -> str:
    copies = parallel.prefill_context_parallel_size
    return (
        f"tensor_parallel_size {parallel.tensor_parallel_size} times pipeline_parallel_size "
        f"{parallel.pipeline_parallel_size}" + f" times prefill_context_parallel_size {copies}" * (copies > 1)
    )


def check_apart(config: EngineConfig, kind: str) -> None:
    """Raise ``ValueError`` naming an option that is not supported with KV in the memory of a device of this kind."""
    _check_state_prompts(config, kind)
    if config.kv.offload_path:
        raise ValueError(f"kv_offload_path: KV on {kind} is not offloaded to files yet")
    if config.kv.store:
        raise ValueError(f"kv_store: KV on {kind} is not shared through stores yet")
    if config.kv.connector:
        raise ValueError(f"kv_connector: KV on {kind} is not given to connectors of plugins yet")
    if config.worker.batch_invariant:
        raise ValueError(f"batch_invariant: products on {kind} follow the batch: choose --device cpu")
    if config.worker.quantization not in (None, "fp8"):
        raise ValueError(f"quantization: {config.worker.quantization} is not supported on {kind}: choose fp8")
    if config.cache.dtype not in ("auto", "fp8"):
        raise ValueError(f"kv_cache_dtype: {config.cache.dtype} is not supported on {kind}: choose fp8")
    if config.worker.cpu_offload_gb:
        _check_offload(config, kind)
    if config.worker.attention_backend in LIBRARIES and kind != "cuda":
        raise ValueError(f"attention_backend {config.worker.attention_backend} does not compute on {kind}: choose auto")
    if not config.kv.transports:
        return
    if "nixl" in config.kv.transports:
        raise ValueError(f"kv_transports: nixl moves no KV on {kind} yet: choose cuda, shm or socket")
    if config.parallel.world_size > 1 or config.parallel.distributed_executor_backend in ("mp", "ray"):
        raise ValueError(f"kv_transports: KV on {kind} moves only if the one worker runs in the core's process (uni)")
    if config.speculative is not None and config.speculative.writes_kv:
        raise ValueError(f"kv_transports: the KV of a draft model on {kind} does not move between engines yet")


def _check_offload(config: EngineConfig, kind: str) -> None:
    """Raise ``ValueError`` naming what keeps weights of a device of this kind from staying in the host's memory."""
    options = {
        f"on {kind}": kind != "cuda",
        "with enable_lora, whose slots lie beside the weights,": config.lora.enable,
        "with experts that move, as enable_eplb or a group of engines moves them to memory of the GPU,": (
            config.parallel.enable_eplb or config.parallel.spreads_experts_over_engines
        ),
    }
    if reason := next((name for name, is_set in options.items() if is_set), None):
        raise ValueError(f"cpu_offload_gb: is not supported {reason} yet: leave it out")


def _check_balancing(parallel: ParallelConfig) -> None:
    if not parallel.enable_eplb:
        if parallel.eplb_config is not None:
            raise ValueError("eplb_config: needs enable_eplb")
        return
    spreads_over_workers = parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1
    if not spreads_over_workers and not parallel.spreads_experts_over_engines:
        raise ValueError("enable_eplb: needs enable_expert_parallel, and several workers or engines to balance")


def num_sharing(config: EngineConfig, num_devices: int | None) -> int:
    """Return how many workers share the memory of a device, of which the process sees so many; None: they share that of
    the host. ``engines_on_host`` counts workers where an engine has several."""
    count = config.cache.engines_on_host
    if num_devices is None:
        return count
    if config.parallel.distributed_executor_backend == "ray":
        return 1  # Ray gives each worker a device of its own, and shows it no other
    return -(-count // num_devices)


def _local_experts(experts: ExpertSwitches, place: RankPlace, layers: slice) -> ExpertSwitches:
    size, num_redundant = place.tensor_size, place.num_redundant_experts or 0
    own = place.experts(experts.count + num_redundant)
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // (size if own is None else 1),
        shared_size=experts.shared_size // size,
        layers=experts.layers[layers],
        own=own,
        num_redundant=num_redundant,
    )


def _check(config: ModelConfig, place: RankPlace) -> None:
    size, kv_heads, mixer = place.tensor_size, config.num_kv_heads, config.mixer
    if config.vocab_size < size:
        raise ValueError(f"tensor_parallel_size: {size} workers for a vocabulary of {config.vocab_size} tokens")
    counts = {"attention heads": config.num_heads, "rows of an MLP": config.intermediate_size}
    if mixer is not None:
        counts |= _counts(mixer, size, config.hidden_size)
    if mixer is not None and not mixer.num_attending():
        del counts["attention heads"]
        kv_heads = size
    if config.experts is not None:
        if not place.spreads_experts:
            counts |= {"rows of an expert": config.experts.intermediate_size}
        counts |= {"rows of the shared expert": config.experts.shared_size}
    _check_redundant(config, place)
    for what, count in counts.items():
        if count % size:
            raise ValueError(f"tensor_parallel_size: {size} does not divide the model's {count} {what}")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"tensor_parallel_size: {size} neither divides the model's {kv_heads} KV heads nor is divided")
    if config.latent is not None and place.spreads_context:
        raise ValueError(
            "decode_context_parallel_size: compressed vectors (MLA) are not spread over workers; leave it out"
        )
    if any(config.attention_chunks) and place.spreads_context:
        raise ValueError(
            "decode_context_parallel_size: attention in chunks of positions is not spread over workers; leave it out"
        )
    num_layers = config.num_layers if mixer is None else len(mixer.layers)
    if place.num_stages > num_layers:
        raise ValueError(f"pipeline_parallel_size: {place.num_stages} stages for {num_layers} layers")


def _counts(mixer: MixerSwitches, size: int, hidden_size: int) -> dict[str, int]:
    """Return what ``size`` ranks must divide of layers that keep a state, by its name."""
    if mixer.kind == "conv":
        return {"channels of a convolution": hidden_size}
    counts = {"heads of layers that keep a state": mixer.heads}
    if mixer.kind == "delta" or size % mixer.groups:  # ranks that share a group of Mamba-2 have it whole
        counts["groups of those heads"] = mixer.groups
    return counts


def _check_redundant(config: ModelConfig, place: RankPlace) -> None:
    redundant, ranks = place.num_redundant_experts, place.num_expert_ranks
    if redundant is None:
        return
    if config.experts is None:
        raise ValueError("enable_eplb: the model has no experts")
    count = config.experts.count
    if place.data_size == 1 and (count + redundant) % ranks:  # engines of a group round up, as their number may change
        raise ValueError(
            f"num_redundant_experts: {count} experts and {redundant} copies are not a multiple of {ranks} ranks; "
            f"{-count % ranks} copies would be"
        )
    if redundant > count * (ranks - 1):
        raise ValueError(
            f"num_redundant_experts: {redundant} is too large: each of {count} experts has one copy at most on each of "
            f"the {ranks - 1} other ranks"
        )
