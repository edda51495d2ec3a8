"""Declares the kernels for Python: argument structs as in ``csrc``, and libraries with typed signatures."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from ctypes import CDLL, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from .compiler import KernelsUnavailable, build, warn_unavailable

_MATRIX_UNIT = "matrix unit (AMX)"
_P, _I64, _I32, _F = c_void_p, c_int64, c_int32, c_float
_TYPES = {"P": _P, "q": _I64, "i": _I32, "f": _F, "s": c_char_p}
"""By the letters of signatures."""
_loaded: list[CDLL] = []
"""As many as there are kinds of kernels."""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class AttentionArgs(Structure):
    """Mirrors the struct in ``attention.cpp``."""

    _fields_ = [
        *_fields(
            _P, "query key value out block_tables query_starts seq_lens members group_starts shared_lens sinks limits"
        ),
        *_fields(
            _I64, "num_groups num_requests num_heads num_kv_heads block_size table_stride query_stride window span"
        ),
        *_fields(_F, "scale softcap"),
        *_fields(_I32, "is_bf16 num_threads"),
    ]


class LatentArgs(Structure):
    """Mirrors the struct in ``latent.cpp``."""

    _fields_ = [
        *_fields(_P, "query cache out block_tables requests lengths"),
        *_fields(_I64, "num_rows num_heads block_size table_stride"),
        *_fields(_F, "scale"),
        *_fields(_I32, "is_bf16 num_threads"),
    ]


class HeadsArgs(Structure):
    """Mirrors the struct in ``fused.cpp``."""

    _fields_ = [
        *_fields(_P, "heads weights cos sin slots keys values"),
        *_fields(_I64, "num_tokens num_heads num_kv_heads head_size rotated_size cache_head_size block_size"),
        *_fields(_F, "eps shift"),
        *_fields(_I32, "is_bf16 is_int8 num_threads"),
    ]


class DraftLayer(Structure):
    """Mirrors the struct in ``drafts.cpp``."""

    _fields_ = _fields(_P, "input_norm qkv head_norm out post_norm gate_up down keys values")


class DraftArgs(Structure):
    """Mirrors the struct in ``drafts.cpp``."""

    _fields_ = [
        *_fields(_P, "layers embedding fc norm output frequencies tokens tables rows starts ends counts before states"),
        *_fields(_P, "drafts found"),
        *_fields(_I64, "num_requests most num_layers vocab hidden inner num_heads num_kv_heads head_size"),
        *_fields(_I64, "cache_head_size block_size tokens_stride tables_stride num_rows num_blocks"),
        *_fields(_F, "eps scale rotation_factor least_confidence"),
        *_fields(_I32, "is_bf16"),
    ]


class GatherArgs(Structure):
    """Mirrors the struct in ``batch.cpp``."""

    _fields_ = [
        *_fields(_P, "tokens computed known tables num_blocks rows lengths token_ids positions slots"),
        *_fields(_P, "query_starts seq_lens block_tables sampled"),
        *_fields(_I64, "num_requests tokens_stride tables_stride block_size num_rows num_blocks_in_all"),
        *_fields(_I64, "most_requests most_tokens num_tokens num_sampled width"),
    ]


class DrawArgs(Structure):
    """Mirrors the struct in ``draw.cpp``."""

    _fields_ = [
        *_fields(_P, "tokens known prompts rows params places logits drawn"),
        *_fields(_I64, "num_drawn tokens_stride logits_stride vocab num_rows num_requests most_drawn"),
        *_fields(_I32, "num_threads"),
    ]


class DeltaArgs(Structure):
    """Mirrors the struct in ``gated_delta.h``."""

    _fields_ = [
        *_fields(_P, "query key value decay beta states out read written starts"),
        *_fields(_I64, "num_runs num_heads num_key_heads key_size value_size key_stride value_stride"),
        *_fields(_I32, "by_channel is_bf16 num_threads"),
    ]


class Mamba2Args(Structure):
    """Mirrors the struct in ``mamba2.h``."""

    _fields_ = [
        *_fields(_P, "x b c dt a d dt_bias states out read written starts"),
        *_fields(_I64, "num_runs num_heads num_groups head_size state_size row_stride dt_stride"),
        *_fields(_F, "least_dt most_dt"),
        *_fields(_I32, "is_bf16 num_threads"),
    ]


class ConvArgs(Structure):
    """Mirrors the struct in ``short_conv.h``."""

    _fields_ = [
        *_fields(_P, "x weight bias gate_in gate_out states out read written starts"),
        *_fields(_I64, "num_runs channels taps row_stride"),
        *_fields(_I32, "has_silu is_bf16 num_threads"),
    ]


class GatedNormArgs(Structure):
    """Mirrors the struct in ``fused.cpp``."""

    _fields_ = [
        *_fields(_P, "x gate weight out"),
        *_fields(_I64, "num_rows num_groups size gate_stride weight_stride"),
        *_fields(_F, "eps"),
        *_fields(_I32, "norm_first is_bf16 num_threads"),
    ]


class ExpertMatrix(Structure):
    """Mirrors the struct in ``quantized_experts.h``."""

    _fields_ = [*_fields(_P, "bytes scales offsets bias"), *_fields(_F, "factor"), *_fields(_I32, "least")]


class ExpertsArgs(Structure):
    """Mirrors the struct in ``quantized_experts.h``."""

    _fields_ = [
        *_fields(_P, "gate_up down rows chosen weights out"),
        *_fields(_I64, "num_rows per_token num_experts hidden inner gate_up_groups_per_scale down_groups_per_scale"),
        *_fields(_I32, "kind activation is_bf16 num_threads"),
    ]


class LoraPart(Structure):
    """Mirrors the struct in ``lora.cpp``."""

    _fields_ = [*_fields(_P, "down up factors shifts"), *_fields(_I64, "rank column outputs")]


class LoraLayer(Structure):
    """Mirrors the struct in ``lora.cpp``."""

    _fields_ = [*_fields(_P, "parts"), *_fields(_I64, "num_parts inputs outputs is_bf16")]


class LoraRows(Structure):
    """Mirrors the struct in ``lora.cpp``."""

    _fields_ = [*_fields(_P, "rows starts slots"), *_fields(_I64, "num_groups num_threads")]


def load_once(load: Callable[..., CDLL]) -> Callable[..., CDLL]:
    """Remember the library that ``load`` returns, or why there is none: every layer of a model asks for it."""

    @functools.cache
    # functools.cache keeps no exceptions. A machine without a compiler would search for one again with every layer.
    def attempt(*march: str) -> CDLL | str:
        try:
            return load(*march)
        except KernelsUnavailable as error:
            return str(error)

    @functools.wraps(load)
    def remembered(*march: str) -> CDLL:
        found = attempt(*march)
        if isinstance(found, str):
            raise KernelsUnavailable(found)
        return found

    return remembered


@functools.cache
def load_attention(head_size: int, march: str = "native", softcap: bool = False, int8: bool = False) -> CDLL:
    """Load attention for one head size, a multiple of 16.

    With ``softcap`` the kernels limit the scores, and only then. With ``int8`` they read and write caches of that
    dtype, and only those. Raises :class:`KernelsUnavailable`.
    """
    switches = {"SOFTCAP": softcap, "KV_INT8": int8}
    macros = {"HEAD_SIZE": head_size} | {name: 1 for name, is_on in switches.items() if is_on}
    return _load(_built("attention", march, **macros), attend="P", write_kv="iPPPPPqqqqq")


@functools.cache
def load_latent(rank: int, rope_size: int, march: str = "native") -> CDLL:
    """Load attention over compressed vectors of ``rank`` elements, a multiple of 64, with rotated keys behind them.
    Raises :class:`KernelsUnavailable`."""
    return _load(_built("latent", march, RANK=rank, WIDTH=rank + rope_size), attend_latents="P")


@functools.cache
def load_fused(march: str = "native") -> CDLL:
    """Load the operations between a layer's matrices. Raises :class:`KernelsUnavailable`."""
    gates = dict.fromkeys(("silu_mul", "gelu_mul", "clamped_swiglu_mul"), "iPPqqi")
    library = _built("fused", march)
    structs = dict.fromkeys(("rotate_and_write", "gated_norm"), "P")
    return _load(library, add_norm="iPPPPqqffi", rotations="PPPPqqfi", sigmoid_mul="iPPPqqii", **structs, **gates)


@load_once
def load_floats(march: str = "native") -> CDLL:
    """Load products with float32 matrices. Raises :class:`KernelsUnavailable`, also without FMA."""
    return _load_panels("floats", march, "FMA")


@load_once
def load_int8(march: str = "native") -> CDLL:
    """Load products with int8 matrices. Raises :class:`KernelsUnavailable`, also if the CPU has no
    matrix unit."""
    parts = {"row_tops": "iPPqqi", "sum_int8": "iPPPPqqqi", "scale_sums": "iPPPPPqqi"}
    return _checked(_load(_built("int8", march), multiply_int8="iPPPPPqqqi", **parts), _MATRIX_UNIT)


@load_once
def load_quantized(march: str = "native") -> CDLL:
    """Load products with matrices of 4 and 8 bits, floats of 4 bits included, and rounding to 4 bits. Raises
    :class:`KernelsUnavailable`, also if the CPU has no AVX2."""
    library = _load(
        _built("quantized", march),
        multiply_quantized="iiPPPPPPqqqqfii",
        round_to_4_bits="iPqqPqPPi",
        pack_quantized="iPPqqii",
        pack_float4="PPqqi",
        compute_experts="P",
    )
    return _checked(library, "AVX2")


@load_once
def load_float8(march: str = "native") -> CDLL:
    """Load products of bfloat16 rows with matrices of 8-bit floats. Raises :class:`KernelsUnavailable`, also without
    FMA."""
    sizes = dict.fromkeys(("panel_outputs", "whole_inputs"), ":q")
    return _checked(_load(_built("float8", march), multiply_float8="PPPPPqqqqi", pack="PPPqqqi", **sizes), "FMA")


@load_once
def load_bfloat16(march: str = "native") -> CDLL:
    """Load products with bfloat16 matrices in float32 arithmetic. Raises :class:`KernelsUnavailable`, also without
    FMA."""
    return _load_panels("bfloat16", march, "FMA")


@load_once
def load_bfloat16_dots(march: str = "native") -> CDLL:
    """Load products with bfloat16 matrices by the instruction for pairs of such numbers. Raises
    :class:`KernelsUnavailable`, also without AVX-512 BF16."""
    return _load_panels("bfloat16_dots", march, "AVX-512 BF16")


@load_once
def load_bfloat16_tiles(march: str = "native") -> CDLL:
    """Load products with bfloat16 matrices on the matrix unit. Raises :class:`KernelsUnavailable`, also if the CPU has
    none."""
    return _load_panels("bfloat16_tiles", march, _MATRIX_UNIT)


@load_once
def load_drafts(march: str = "native") -> CDLL:
    """Load the steps of small draft models. Raises :class:`KernelsUnavailable`."""
    library = _built("drafts", march)
    return _load(library, matrix_bytes="qqi:q", arrange_matrix="PPqqi", draft_greedily="P:q")


@load_once
def load_replay(march: str = "native") -> CDLL:
    """Load what runs recorded steps. Raises :class:`KernelsUnavailable`."""
    return _load(
        _built("replay", march),
        find_signature="s:q",
        replay="Pq",
        gather_rows="PPPqqq",
        gather_own_rows="PPPqqqq",
        copy_rows="PqPqqq",
        add_to="iPPq",
        scale="iPfq",
        widen="PPq",
    )


@load_once
def load_batch(march: str = "native") -> CDLL:
    """Load what gathers the arrays of steps. Raises :class:`KernelsUnavailable`."""
    return _load(_built("batch", march), gather="P:q")


@load_once
def load_draw(march: str = "native") -> CDLL:
    """Load what draws the tokens of steps. Raises :class:`KernelsUnavailable`."""
    return _load(_built("draw", march), append_drawn="P:i")


@load_once
def load_states(march: str = "native") -> CDLL:
    """Load layers that keep a state between tokens. Raises :class:`KernelsUnavailable`."""
    structs = dict.fromkeys(("gated_delta", "mamba2", "short_conv"), "P")
    return _load(_built("states", march), delta_gates="iPPPPPPqqq", **structs)


@load_once
def load_sums(march: str = "native") -> CDLL:
    """Load what joins and gathers the tensors of ranks on one machine. Raises :class:`KernelsUnavailable`."""
    return _load(_built("sums", march), shared_bytes="q:q", sum_ranks="PPqiii", gather_ranks="PPPqqii")


def loaded_libraries() -> Sequence[CDLL]:
    """Return every library that was loaded so far."""
    return _loaded


@load_once
def load_lora(march: str = "native") -> CDLL:
    """Load the products with the matrices of LoRA adapters. Raises :class:`KernelsUnavailable`."""
    return _load(_built("lora", march), rank_step=":q", panel_outputs=":q", add_lora="PPPP")


@load_once
def load_pool(march: str = "native") -> CDLL:
    """Load what sets how the kernels of this process share their work among threads. Raises
    :class:`KernelsUnavailable`."""
    return _load(_built("pool", march), set_waiting="iq", set_most_threads="i", keep_apart="i")


def _built(source: str, march: str, **macros: int) -> Path:
    """Return the library as :func:`.build`, and note a failure: some of those that ask compute otherwise silently,
    because for them a processor without the instructions is in order."""
    try:
        return build(source, march, None, **macros)
    except KernelsUnavailable as error:
        warn_unavailable(str(error))
        raise


def _load_panels(source: str, march: str, needed: str) -> CDLL:
    sizes = dict.fromkeys(("panel_outputs", "word_outputs", "word_inputs", "whole_inputs"), ":q")
    return _checked(_load(_built(source, march), multiply="PPPPqqqi", pack="PPqqi", **sizes), needed)


def _checked(library: CDLL, needed: str) -> CDLL:
    library.can_multiply.restype = _I32
    if not library.can_multiply():
        raise KernelsUnavailable(f"the CPU has no {needed}")
    return library


def _load(path: Path, **signatures: str) -> CDLL:
    """Load a library. ``signatures``: of its functions, a letter for each argument, and behind a colon one for the
    result, if there is one."""
    try:
        library = CDLL(str(path))  # ctypes releases the interpreter lock during its calls
    except OSError as error:
        reason = f"{path.name} cannot be loaded: {error}"
        warn_unavailable(reason)
        raise KernelsUnavailable(reason) from None
    for name, signature in signatures.items():
        arguments, _, result = signature.partition(":")
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], _TYPES.get(result)
    _loaded.append(library)
    return library


def uses_triton(device: torch.device) -> bool:
    """Return whether the kernels of ``kernels.triton`` compute on this device: on a GPU where Triton is installed."""
    return device.type == "cuda" and _is_installed()


_FP8_CAPABILITY = (8, 9)
"""Of the first GPUs whose tensor cores multiply 8-bit floats (Ada); Hopper has 9.0."""


def computes_fp8(device: torch.device) -> bool:
    """Return whether this is a GPU whose tensor cores multiply 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
