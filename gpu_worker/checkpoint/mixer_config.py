"""Reads which layers of a decoder keep a state between tokens, and the shapes of what they compute. It does not import
torch."""

from dataclasses import replace
from importlib.metadata import version
from typing import Literal, NamedTuple

from .files.architectures import DECODERS, STATEFUL
from .files.config_reader import ConfigReader
from .model_config import DtypeName, MixerSwitches, ModelConfig, Multipliers, StateLayout, StateShape
from .rope_config import no_rotation

_FORMS = {"delta": "gdn-scan-fp32", "kimi": "kda-scan-fp32", "mamba2": "mamba2-scan-fp32", "conv": "conv"}
"""How states are computed, as an engine's numerics name it: token after token, in float32."""
StatePrompts = Literal["scan", "chunks", "fla"]
"""How prompts of layers with a recurrence are computed: ``state_prompts`` of the engine's options, decided."""
STATE_CHUNK = 64
"""Tokens of a chunk in which a GPU computes them; ``fla-core`` has the same."""
_CHUNK_FORMS = {"delta": "gdn", "kimi": "kda", "mamba2": "mamba2"}
_MOST_CHUNK_STATE = 256
"""Elements of a row of a state, or channels of a key, up to which a chunk has room in every GPU; prompts with more are
scanned. Those of ``fla-core`` end there, too."""
FLA = "fla-core"
"""The package that computes prompts if ``fla`` is chosen; it has no kernels for Mamba-2's groups."""
_KEEPING = ("linear_attention", "mamba", "conv")
_ATTENDING = ("full_attention", "attention")
_PARTS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The kinds of Nemotron-H's layers by the letters of ``hybrid_override_pattern``."""


class _Mamba2Entries(NamedTuple):
    """Holds what a family's configuration calls the entries of Mamba-2, and its class's defaults."""

    heads: str = "mamba_n_heads"
    head_size: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    default_head_size: int | None = None
    """None: that of the inner size by the heads."""
    default_groups: int = 1
    default_state_size: int = 256


_MAMBA2 = _Mamba2Entries(
    *("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_bias", "use_conv_bias"), 64, 8, 128
)
_NEMOTRON = _MAMBA2._replace(heads="mamba_num_heads", head_size="mamba_head_dim", state_size="ssm_state_size")
_OF_TRAINING = """chunk_size time_step_min time_step_max time_step_floor time_step_rank rescale_prenorm_residual
    residual_in_fp32"""
"""Say how weights begin, how large chunks are, and where the sums of layers are more precise than the model's dtype."""
_NEMOTRON_UNREAD = """expand hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_layers_block_type mtp_hybrid_override_pattern
    n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_logits_to_keep num_query_groups
    output_router_logits rms_norm_eps routed_scaling_factor topk_group use_mamba_kernels"""
"""Published files of models without experts hold them; the class does not read them there."""
_FALCON_UNREAD = "mamba_chunk_size mamba_use_mlp mlp_expansion_factor num_logits_to_keep"


def read_mixer(reader: ConfigReader, family: str, hidden_size: int, num_layers: int) -> MixerSwitches | None:
    """Return what the layers of ``family`` that keep a state compute; None: it has none. Raises ``ValueError`` naming
    an entry that is wrong or not supported."""
    if family not in STATEFUL:
        return None
    if family == "nemotron_h":
        return _read_nemotron(reader, hidden_size, num_layers)
    if family == "falcon_h1":
        return _read_falcon(reader, hidden_size, num_layers)
    if family == "kimi_linear":
        return _read_kimi(reader, num_layers)
    layers = _kept_layers(reader, family, num_layers)
    if all(layers):
        raise reader.unsupported("layer_types", "must name a layer with attention")
    match family:
        case "granitemoehybrid":
            reader.take("mamba_chunk_size")  # of the form that computes chunks
            inner = reader.take_int("mamba_expand", 2) * hidden_size
            return _read_mamba2(reader, inner, layers, _Mamba2Entries())
        case "lfm2":
            taps, bias = reader.take_int("conv_L_cache", 3) - 1, reader.take_bool("conv_bias", False)
            return MixerSwitches(kind="conv", taps=taps, has_bias=bias, has_conv_bias=bias, layers=layers)
    return _read_delta(reader, layers)


def _kept_layers(reader: ConfigReader, family: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it keeps a state. Without a list every fourth layer of Qwen's attends, and those of
    LFM2 whose numbers are listed."""
    kinds = reader.take("layer_types")
    kinds = reader.take("layers_block_type") if kinds is None and family == "granitemoehybrid" else kinds
    interval, attending = reader.take_int("full_attention_interval", 4), reader.take("full_attn_idxs")
    if kinds is None:
        if family == "lfm2" and isinstance(attending, list):
            return tuple(layer not in attending for layer in range(num_layers))
        return tuple(bool((layer + 1) % interval) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.error("layer_types", f"must be a list of num_hidden_layers = {num_layers} entries")
    if unknown := set(map(str, kinds)).difference(_KEEPING, _ATTENDING):
        raise reader.unsupported("layer_types", f"holds {', '.join(sorted(unknown))}, which is not known")
    return tuple(kind in _KEEPING for kind in kinds)


def _read_delta(reader: ConfigReader, layers: tuple[bool, ...]) -> MixerSwitches:
    """Read the gated delta net of Qwen3-Next and Qwen3.5."""
    _check(reader, "attn_output_gate", True)
    _check(reader, "output_gate_type", "swish")
    _check(reader, "mamba_ssm_dtype", "float32")
    if reader.take("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "must be silu")
    heads, groups = reader.take_int("linear_num_value_heads", 32), reader.take_int("linear_num_key_heads", 16)
    if heads % groups:
        raise reader.error("linear_num_key_heads", f"must divide linear_num_value_heads = {heads}")
    return MixerSwitches(
        kind="delta",
        heads=heads,
        groups=groups,
        head_size=reader.take_int("linear_value_head_dim", 128),
        state_size=_state_size(reader, "linear_key_head_dim", 128),
        taps=reader.take_int("linear_conv_kernel_dim", 4) - 1,
        layers=layers,
    )


def _read_kimi(reader: ConfigReader, num_layers: int) -> MixerSwitches:
    """Read the delta attention of Kimi-Linear, whose published files have an object for it, and count layers from 1."""
    _check(reader, "mla_use_nope", True)
    if reader.take("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "must be silu")
    found = reader.take("linear_attn_config")
    nested, kinds = found if isinstance(found, dict) else {}, reader.take("layer_types")
    heads, size, kernel = (
        nested.get(own, reader.take_int(name, default))
        for own, name, default in (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    )
    if kinds is None and isinstance(keeping := nested.get("kda_layers"), list):
        layers = tuple(layer + 1 in keeping for layer in range(num_layers))
    elif kinds is None:
        layers = tuple(layer == 0 or layer % 4 != 0 for layer in range(num_layers))
    else:
        layers = _kept_layers(reader, "kimi_linear", num_layers)
    if all(layers):
        raise reader.unsupported("layer_types", "must name a layer with attention")
    if size > _MOST_STATE_SIZE:
        raise reader.unsupported("linear_attn_config", f"must have heads of at most {_MOST_STATE_SIZE}")
    return MixerSwitches(
        kind="kimi", heads=heads, groups=heads, head_size=size, state_size=size, taps=kernel - 1, layers=layers
    )


def count_parts(reader: ConfigReader, family: str) -> int | None:
    """Return how many layers a configuration names that states no number; None: it must."""
    return len(_read_parts(reader)) if family == "nemotron_h" else None


def _read_parts(reader: ConfigReader) -> list[str]:
    """Return the kind of each layer of Nemotron-H."""
    name, kinds = "layers_block_type", reader.take("layers_block_type")
    if kinds is None:
        name, pattern = "hybrid_override_pattern", reader.take("hybrid_override_pattern")
        kinds = [_PARTS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else None
    if not isinstance(kinds, list) or not kinds:
        raise reader.error(name, "must name the kind of each layer")
    if unknown := set(map(str, kinds)).difference(_KEEPING, _ATTENDING, {"mlp"}):
        raise reader.unsupported(name, f"holds {', '.join(sorted(unknown))}, which is not built in")
    return kinds


def _read_nemotron(reader: ConfigReader, hidden_size: int, num_layers: int) -> MixerSwitches:
    """Read the layers of Nemotron-H, each of which is a Mamba-2, attention, or an MLP."""
    kinds = _read_parts(reader)
    if len(kinds) != num_layers:
        raise reader.error("num_hidden_layers", f"must be the number of layers, {len(kinds)}")
    if not set(kinds).intersection(_ATTENDING):
        raise reader.unsupported("layers_block_type", "must name a layer with attention")
    for unread in (*_OF_TRAINING.split(), *_NEMOTRON_UNREAD.split()):
        reader.take(unread)
    _check(reader, "sliding_window", None)
    _check(reader, "mamba_hidden_act", "silu")
    if reader.take("attention_head_dim") not in (None, reader.take("head_dim", 128)):
        raise reader.error("attention_head_dim", "must be head_dim, by default 128")
    layers = tuple(kind in _KEEPING for kind in kinds)
    mixer = _read_mamba2(reader, None, layers, _NEMOTRON)
    return replace(mixer, mlps=tuple(kind == "mlp" for kind in kinds))


def _read_falcon(reader: ConfigReader, hidden_size: int, num_layers: int) -> MixerSwitches:
    """Read Falcon-H1, each of whose layers has Mamba-2 beside attention."""
    for unread in (*_OF_TRAINING.split(), *_FALCON_UNREAD.split()):
        reader.take(unread)
    _check(reader, "attn_layer_indices", None)
    if reader.take("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "must be silu")
    inner, expanded = reader.take("mamba_d_ssm", 1024), reader.take_int("mamba_expand", 2) * hidden_size
    inner = expanded if inner is None else reader.take_int("mamba_d_ssm", 1024)
    mixer = _read_mamba2(reader, inner, (True,) * num_layers, _Mamba2Entries())
    if reader.take_bool("projectors_bias", False) != mixer.has_bias:
        raise reader.unsupported("projectors_bias", "must be mamba_proj_bias")
    return replace(
        mixer,
        has_norm=reader.take_bool("mamba_rms_norm", False),
        norms_first=reader.take_bool("mamba_norm_before_gate", True),
        is_beside_attention=True,
    )


def read_multipliers(reader: ConfigReader) -> Multipliers:
    """Return the factors of Falcon-H1's layers. Raises ``ValueError`` naming an entry that is wrong."""
    gate, down = _factors(reader, "mlp_multipliers", 2)
    return Multipliers(
        attention_in=reader.take_float("attention_in_multiplier", 1.0),
        attention_out=reader.take_float("attention_out_multiplier", 1.0),
        key=reader.take_float("key_multiplier", 1.0),
        gate=gate,
        down=down,
        mixer_in=reader.take_float("ssm_in_multiplier", 1.0),
        mixer_out=reader.take_float("ssm_out_multiplier", 1.0),
        mixer_parts=_factors(reader, "ssm_multipliers", 5),
    )


def _factors(reader: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    factors = reader.take(name)
    if factors is None:
        return (1.0,) * count
    if not isinstance(factors, list) or [type(each) in (int, float) for each in factors] != [True] * count:
        raise reader.error(name, f"must be a list of {count} numbers")
    return tuple(map(float, factors))


def read_mamba2(reader: ConfigReader, dtype: DtypeName, wanted_model_len: int | None) -> ModelConfig:
    """Read a model of nothing but Mamba-2. Raises ``ValueError`` naming an entry that is wrong or not supported."""
    traits, hidden_size = DECODERS["mamba2"], reader.take_int("hidden_size")
    for unread in _OF_TRAINING.split():
        reader.take(unread)
    _check(reader, "hidden_act", "silu")
    layers = (True,) * reader.take_layers("num_hidden_layers")
    mixer = _read_mamba2(reader, reader.take_int("expand", 2) * hidden_size, layers, _MAMBA2)
    return ModelConfig(
        family="mamba2",
        dtype_name=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=mixer.inner_size,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        # A state has no end: without an entry requests are as long as the engine's options allow.
        max_model_len=reader.take_int("max_position_embeddings", wanted_model_len or _UNSTATED_LENGTH),
        norm_eps=reader.take_float(traits.norm_eps_entry, traits.norm_eps),
        hidden_act="silu",
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", traits.is_tied),
        ropes=(no_rotation(16),),
        attention_scales=(1.0,),
        sliding_windows=(None,),
        mixer=mixer,
        states=state_layout(mixer, hidden_size),
    )


def _read_mamba2(
    reader: ConfigReader, inner: int | None, layers: tuple[bool, ...], entries: _Mamba2Entries
) -> MixerSwitches:
    """Read Mamba-2, whose heads have ``inner`` inputs together; None: as many as they say."""
    heads = reader.take_int(entries.heads, 128)
    default = entries.default_head_size or (inner or 0) // heads
    head_size = default if reader.take(entries.head_size) in (None, "auto") else reader.take_int(entries.head_size)
    if inner is not None and heads * head_size != inner:
        raise reader.error(entries.head_size, f"must be the {inner} inputs / {entries.heads} = {inner / heads:g}")
    groups = reader.take_int(entries.groups, entries.default_groups)
    if heads % groups:
        raise reader.error(entries.groups, f"must divide {entries.heads} = {heads}")
    return MixerSwitches(
        kind="mamba2",
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=_state_size(reader, entries.state_size, entries.default_state_size),
        taps=reader.take_int(entries.kernel, 4) - 1,
        has_bias=reader.take_bool(entries.bias, False),
        has_conv_bias=reader.take_bool(entries.conv_bias, True),
        dt_limits=_read_limits(reader),
        layers=layers,
    )


def _read_limits(reader: ConfigReader) -> tuple[float, float]:
    """Return the limits of the step of time. transformers writes an infinite one as an object."""
    limits = reader.take("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    except (TypeError, ValueError, KeyError):
        raise reader.error("time_step_limit", "must be two numbers") from None
    return least, most


_MOST_STATE_SIZE = 512
_UNSTATED_LENGTH = 2048
"""As transformers' modules have it."""


def has_chunks(mixer: MixerSwitches, prompts: StatePrompts) -> bool:
    """Return whether layers compute prompts in chunks, if those that can do so compute them like ``prompts``."""
    return prompts != "scan" and mixer.kind in _CHUNK_FORMS and mixer.state_size <= _MOST_CHUNK_STATE


def with_prompts(config: ModelConfig, prompts: StatePrompts) -> ModelConfig:
    """Return the configuration of a model whose recurrences compute prompts so: what their sums depend on."""
    mixer, states = config.mixer, config.states
    if mixer is None or states is None or not has_chunks(mixer, prompts):
        return config
    # Other versions may sum in another order.
    suffix = f"{FLA}-{version(FLA)}" if prompts == "fla" else "products"
    return replace(config, states=replace(states, form=f"{_CHUNK_FORMS[mixer.kind]}-{suffix}", chunk=STATE_CHUNK))


def check_state_prompts(config: ModelConfig | None, wanted: str) -> None:
    """Raise ``ValueError`` if a model, whole, has no recurrence of which ``wanted`` could say how prompts are computed.
    None: transformers' modules compute it."""
    if wanted == "auto":
        return
    if config is None or config.mixer is None or config.mixer.kind not in _CHUNK_FORMS:
        raise ValueError(
            f"state_prompts: {wanted} says how built-in layers with a recurrence compute prompts, and this model has "
            "none; leave it out"
        )
    if wanted != "scan" and config.mixer.state_size > _MOST_CHUNK_STATE:
        raise ValueError(
            f"state_prompts: {wanted} knows states of at most {_MOST_CHUNK_STATE} elements a row, not of "
            f"{config.mixer.state_size}; choose scan, or leave it out"
        )
    if wanted == "fla" and config.mixer.kind == "mamba2":
        raise ValueError(f"state_prompts: {FLA} does not compute Mamba-2 here; choose chunks, or leave it out")
    if wanted == "fla" and config.dtype_name == "float32":
        raise ValueError(f"state_prompts: {FLA} does not compute float32; choose chunks, or the dtype bfloat16")


def _state_size(reader: ConfigReader, name: str, default: int) -> int:
    if (size := reader.take_int(name, default)) > _MOST_STATE_SIZE:
        raise reader.unsupported(name, f"must be at most {_MOST_STATE_SIZE}")
    return size


def _check(reader: ConfigReader, name: str, known: object) -> None:
    """Take an entry of published files that the class does not read, if it says what the class computes."""
    if reader.take(name, known) != known:
        raise reader.unsupported(name, f"must be {known}", is_known=False)


def state_layout(mixer: MixerSwitches, hidden_size: int) -> StateLayout:
    """Return what each layer keeps of a sequence between tokens."""
    recurrent = None
    if mixer.kind in ("delta", "kimi"):
        recurrent = (mixer.heads, mixer.state_size, mixer.head_size)
    elif mixer.kind == "mamba2":
        recurrent = (mixer.heads, mixer.head_size, mixer.state_size)
    shape = StateShape(mixer.conv_channels or hidden_size, mixer.taps, recurrent)
    return StateLayout(tuple(shape if keeps else None for keeps in mixer.layers), _FORMS[mixer.kind])
