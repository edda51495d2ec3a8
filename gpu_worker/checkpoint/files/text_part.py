"""Says which entries and tensors of a checkpoint that reads images or sound are its text model's, and what these
change in that. It does not import torch.

The facts are from transformers 5.24: the configuration of each class (``configuration_*.py``) for defaults and
``conversion_mapping.py`` for names of tensors.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class _Wrapper(NamedTuple):
    """Describes a class that holds a text model among other parts."""

    kind: str
    """Its ``model_type``."""
    text: str
    """The ``model_type`` of the text model if the configuration states none."""
    is_tied: bool = False
    """Whether the output layer is that of the embeddings if the configuration says nothing."""
    media: tuple[str, ...] = ()
    """What prompts may hold beside text: ``image``, ``audio``; empty: its text alone is served."""


_IMAGES = ("image",)
_VIDEOS = ("image", "video")
WRAPPERS = {
    "Qwen2VLForConditionalGeneration": _Wrapper("qwen2_vl", "qwen2_vl_text", media=_VIDEOS),
    "Qwen2_5_VLForConditionalGeneration": _Wrapper("qwen2_5_vl", "qwen2_5_vl_text", media=_VIDEOS),
    "Qwen3VLForConditionalGeneration": _Wrapper("qwen3_vl", "qwen3_vl_text", media=_VIDEOS),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper("qwen3_vl_moe", "qwen3_vl_moe_text", media=_VIDEOS),
    "Qwen3_5ForConditionalGeneration": _Wrapper("qwen3_5", "qwen3_5_text", media=_VIDEOS),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper("qwen3_5_moe", "qwen3_5_moe_text", media=_VIDEOS),
    "Mistral3ForConditionalGeneration": _Wrapper("mistral3", "mistral", is_tied=True, media=_IMAGES),
    "LlavaForConditionalGeneration": _Wrapper("llava", "llama", media=_IMAGES),
    "LlavaNextForConditionalGeneration": _Wrapper("llava_next", "llama"),
    "LlavaOnevisionForConditionalGeneration": _Wrapper("llava_onevision", "qwen2", media=_VIDEOS),
    "InternVLForConditionalGeneration": _Wrapper("internvl", "qwen2", is_tied=True, media=_VIDEOS),
    "Idefics3ForConditionalGeneration": _Wrapper("idefics3", "llama", media=_IMAGES),
    "SmolVLMForConditionalGeneration": _Wrapper("smolvlm", "llama", media=_VIDEOS),
    "AyaVisionForConditionalGeneration": _Wrapper("aya_vision", "cohere2", is_tied=True),
    "Gemma3ForConditionalGeneration": _Wrapper("gemma3", "gemma3_text", is_tied=True, media=_IMAGES),
    "Gemma4ForConditionalGeneration": _Wrapper("gemma4", "gemma4_text", is_tied=True, media=_VIDEOS),
    "Llama4ForConditionalGeneration": _Wrapper("llama4", "llama4_text"),
    "MuseGlimmerForConditionalGeneration": _Wrapper("muse_glimmer", "muse_glimmer_text"),
    "Phi4MMForCausalLM": _Wrapper("phi4mm", "phi3"),
    "Qwen2AudioForConditionalGeneration": _Wrapper("qwen2_audio", "qwen2", media=("audio",)),
}
_BY_KIND = {wrapper.kind: name for name, wrapper in WRAPPERS.items()}

# A token of a text has the same position in time, height and width, so that the rotation by three positions is the
# ordinary one.
_PLAIN_KINDS = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
}
"""By the type of a text model: the one that computes the same for text."""
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Say which dimensions of a head rotate by which of the three positions."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LENGTH, _KV_HEADS, _THETA = "max_position_embeddings", "num_key_value_heads", "rope_theta"
_TIED = "tie_word_embeddings"


def _sizes(*values: int, length: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    heads = {} if kv_heads is None else {_KV_HEADS: kv_heads}
    return dict(zip(_SIZES, values, strict=True)) | {_LENGTH: length} | heads | more


_QWEN2_VL = _sizes(
    152064, 8192, 29568, 80, 64, length=32768, kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80
)
_QWEN = _sizes(151936, 4096, 22016, 32, 32, length=32768, kv_heads=32)
_DEFAULTS = {
    "llama": _sizes(32000, 4096, 11008, 32, 32, length=2048),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, length=131072, kv_heads=8),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _QWEN | {_LENGTH: 128000, _THETA: 5e5},
    "qwen3_vl_moe_text": _sizes(
        151936, 2048, 5632, 24, 16, length=128000, kv_heads=16, rope_theta=5e5, num_experts_per_tok=4, num_experts=60,
        moe_intermediate_size=1408, norm_topk_prob=True,
    ),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, length=131072, kv_heads=4),
}  # fmt: skip
"""By the type of a text model: what published files leave out (LLaVA-1.5 states no size, Gemma 3 no head)."""
_NEWER_NAMES = {"num_experts": "num_local_experts"}
"""What transformers 5 calls entries of Qwen3-VL when it saves a model."""

_OTHER_NAMES = """
    text_config vision_config audio_config image_token_id image_token_index video_token_id video_token_index
    vision_start_token_id vision_end_token_id vision_token_id audio_token_id audio_token_index ignore_index boi_token_id
    boi_token_index eoi_token_id eoi_token_index boa_token_id boa_token_index eoa_token_id eoa_token_index
    image_seq_length mm_tokens_per_image vision_soft_tokens_per_image audio_soft_tokens_per_image downsample_ratio
    projector_hidden_act multimodal_projector_bias vision_feature_layer vision_feature_select_strategy
    projector_hidden_size out_hidden_size spatial_merge_size image_grid_pinpoints vision_aspect_ratio
    use_image_newline_parameter downsample_factor adapter_layer_norm_eps scale_factor pixel_shuffle_factor
    perceiver_config qk_layer_norms use_resampler neftune_noise_alpha auto_map embd_layer img_processor audio_processor
    speech_lora vision_lora
    """
_OTHER_PARTS = frozenset(_OTHER_NAMES.split())
"""Entries that only the other parts, or what joins them to the text model, read."""


def wrapper_of(values: Mapping[str, Any]) -> str | None:
    """Return the class that holds a text model among other parts, for the content of a ``config.json``; None: the
    checkpoint is a text model itself, or of a class that is not known here."""
    listed = values.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    by_kind = None if names or values.get("auto_map") else _BY_KIND.get(str(values.get("model_type")))
    return next((name for name in names if name in WRAPPERS), by_kind)


def text_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the text model in the content of a ``config.json``, named as its own file would have them;
    all entries if it is nothing but a text model."""
    name = wrapper_of(values)
    if name is None:
        return dict(values)
    wrapper, nested = WRAPPERS[name], values.get("text_config")
    text, outer = _own(nested if isinstance(nested, dict) else {}), _own(values)
    kind = str(text.get("model_type") or wrapper.text)
    defaults = {key: value for key, value in _DEFAULTS.get(kind, {}).items() if _NEWER_NAMES.get(key) not in text}
    # As published, Qwen2-VL and Qwen2.5-VL have the entries of both parts side by side.
    entries = outer | defaults | text if text else defaults | outer
    is_tied = text.get(_TIED) or values.get(_TIED, wrapper.is_tied)
    entries |= {key: outer[key] for key in ("dtype", "torch_dtype", "quantization_config") if outer.get(key)}
    entries |= {"model_type": _PLAIN_KINDS.get(kind, kind), _TIED: is_tied}
    if not is_tied and _TIED not in text:
        del entries[_TIED]  # the default of the text's own class counts
    entries.pop("architectures", None)
    if kind in _PLAIN_KINDS:
        entries |= {key: _plain_rope(entries[key]) for key in ("rope_scaling", "rope_parameters") if key in entries}
    return entries


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that no other part reads; transformers 4.52 to 4.56 write those of all into text_config."""
    return {key: value for key, value in values.items() if key not in _OTHER_PARTS}


def _plain_rope(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    return {key: "default" if value == "mrope" else value for key, value in rope.items() if key not in _SECTIONS}


class MediaSwitches(NamedTuple):
    """Holds what images and sounds change in a text model."""

    levels: int = 1
    """Rows side by side in a row of the tower: the first replaces a token's embedding, the others are added after the
    first layers, one each (deepstack)."""
    seen_whole: Literal["all", "sliding"] | None = None
    """The layers in which a token of an image sees the image's later tokens; None: none is."""
    axes: tuple[int, ...] = ()
    """[pairs of dimensions that rotate]: which position of a token turns each, that in time, height or width; empty: a
    token has one position."""
    kinds: tuple[str, ...] = _IMAGES
    """What prompts may hold beside text: ``image``, ``audio``, ``video``."""


_DEEPSTACK = (8, 16, 24)
_QWEN_SECTIONS = {
    "qwen2_vl": (16, 24, 24),
    "qwen2_5_vl": (16, 24, 24),
    "qwen3_vl": (24, 20, 20),
    "qwen3_5": (11, 11, 10),
}
"""What the classes take where the file states nothing."""


def media_switches(values: Mapping[str, Any]) -> MediaSwitches | None:
    """Return what images and sounds change in the text model of a ``config.json`` with these entries; None: it reads
    text alone, or they are not served. Raises ``ValueError`` for entries that describe no axes or levels."""
    name = wrapper_of(values)
    if name is None or not WRAPPERS[name].media:
        return None
    kind, text, tower = WRAPPERS[name].kind, _object(values, "text_config"), _object(values, "vision_config")
    match kind:
        case "gemma3":
            return MediaSwitches(seen_whole="all")
        case "gemma4":
            is_whole = text.get("use_bidirectional_attention") == "vision"
            return MediaSwitches(seen_whole="sliding" if is_whole else None, kinds=WRAPPERS[name].media)
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            is_third = kind.startswith("qwen3_vl")
            entries = text or values
            rope = _object(entries, "rope_parameters") or _object(entries, "rope_scaling")
            sections = _numbers(rope, "mrope_section", 3) or _QWEN_SECTIONS[kind.removesuffix("_moe")]
            indexes = _numbers(tower, "deepstack_visual_indexes")
            levels = 1 + len(_DEEPSTACK if indexes is None else indexes) if is_third else 1
            axes = _in_a_row(sections) if kind.startswith("qwen2") else _alternating(sections)
            return MediaSwitches(levels, axes=axes, kinds=WRAPPERS[name].media)
    return MediaSwitches(kinds=WRAPPERS[name].media)


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


_MOST_PAIRS = 4096
"""Of numbers of a head, and of layers: what a damaged file may state."""


def _numbers(values: Mapping[str, Any], name: str, count: int | None = None) -> tuple[int, ...] | None:
    """Return an entry that lists small numbers; None: it is absent. Raises ``ValueError`` for anything else."""
    if (found := values.get(name)) is None:
        return None
    if not isinstance(found, list) or count not in (None, len(found)):
        found = [None]
    if any(type(each) is not int or not 0 <= each <= _MOST_PAIRS for each in found):
        raise ValueError(f"config.json: {name} must list {count or 'only'} integers from 0 to {_MOST_PAIRS}")
    return tuple(found)


def _in_a_row(sections: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _alternating(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of pairs that take turns; pairs that are left over belong to the first axis."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(range(axis, min(3 * sections[axis], len(axes)), 3))
    return tuple(axes)


_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of the text model's tensors begin, and how they do in a checkpoint of its own. Later files of transformers
have the first, earlier ones the others; Qwen2-VL and Qwen2.5-VL have the names of a text model."""
_OTHER_PREFIXES = tuple(
    f"{above}{part}"
    for above in ("", "model.")
    for part in (
        *("visual.", "vision_tower.", "vision_model.", "audio_tower.", "embed_vision.", "embed_audio."),
        *("multi_modal_projector.", "image_newline", "vision_adapter.", "vision_projection."),
        *("embed_tokens_extend.", "connector."),
    )
)
"""How names of other parts' tensors begin."""


_ADAPTERS = tuple(f".lora_{matrix}.{part}." for matrix in "AB" for part in ("speech", "vision"))
"""Are in the names of what Phi-4-multimodal adds to layers of its text where a prompt has sound or images."""


def text_tensor(name: str) -> str | None:
    """Return how a checkpoint of the text model alone names a tensor; None: it is of another part."""
    if name.startswith(_OTHER_PREFIXES) or any(adapter in name for adapter in _ADAPTERS):
        return None
    name = name.replace(".base_layer.", ".")
    for prefix, plain in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
