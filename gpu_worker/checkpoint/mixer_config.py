"""Reads which layers of a decoder keep a state between tokens, and the shapes of what they compute. It does not import
torch."""

from .files.config_reader import ConfigReader
from .files.supported import STATEFUL
from .model_config import MixerSwitches, StateLayout, StateShape

_FORMS = {"delta": "gdn-scan-fp32", "mamba2": "mamba2-scan-fp32", "conv": "conv"}
"""How states are computed, as an engine's numerics name it: token after token, in float32."""
_KEEPING = ("linear_attention", "mamba", "conv")
_ATTENDING = ("full_attention", "attention")


def read_mixer(reader: ConfigReader, family: str, hidden_size: int, num_layers: int) -> MixerSwitches | None:
    """Return what the layers of ``family`` that keep a state compute; None: it has none. Raises ``ValueError`` naming
    an entry that is wrong or not supported."""
    if family not in STATEFUL:
        return None
    layers = _kept_layers(reader, family, num_layers)
    if all(layers):
        raise reader.unsupported("layer_types", "must name a layer with attention")
    match family:
        case "granitemoehybrid":
            return _read_mamba2(reader, hidden_size, layers)
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


def _read_mamba2(reader: ConfigReader, hidden_size: int, layers: tuple[bool, ...]) -> MixerSwitches:
    """Read the Mamba-2 of Granite 4."""
    reader.take("mamba_chunk_size")  # of the form that computes chunks
    inner, heads = reader.take_int("mamba_expand", 2) * hidden_size, reader.take_int("mamba_n_heads", 128)
    head_size = inner // heads
    if reader.take("mamba_d_head", "auto") not in ("auto", head_size) or inner % heads:
        raise reader.error("mamba_d_head", f"must be mamba_expand * hidden_size / mamba_n_heads = {inner / heads:g}")
    groups = reader.take_int("mamba_n_groups", 1)
    if heads % groups:
        raise reader.error("mamba_n_groups", f"must divide mamba_n_heads = {heads}")
    return MixerSwitches(
        kind="mamba2",
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=_state_size(reader, "mamba_d_state", 256),
        taps=reader.take_int("mamba_d_conv", 4) - 1,
        has_bias=reader.take_bool("mamba_proj_bias", False),
        has_conv_bias=reader.take_bool("mamba_conv_bias", True),
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
    if mixer.kind == "delta":
        recurrent = (mixer.heads, mixer.state_size, mixer.head_size)
    elif mixer.kind == "mamba2":
        recurrent = (mixer.heads, mixer.head_size, mixer.state_size)
    shape = StateShape(mixer.conv_channels or hidden_size, mixer.taps, recurrent)
    return StateLayout(tuple(shape if keeps else None for keeps in mixer.layers), _FORMS[mixer.kind])
