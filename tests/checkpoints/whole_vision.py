"""Writes tiny checkpoints of models that read images as a mesh serves them: configuration, weights of decoder and
tower, tokenizer with the tokens that stand for images, what the image processor reads, and a chat template.

The entries of the files are those of the published checkpoints that ``tests/parity/vision_checkpoints.py`` names, of
other sizes; the templates are our own, with the same marks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.parity.vision_checkpoints import CONFIGS, write_vision

TOKENS = (
    *("<pad>", "<s>", "</s>", "<image>", "<video>"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"),
    *("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>"),
    *("<|image>", "<image|>", "<|image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>", "<|turn>", "<turn|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
"""Behind the 256 bytes: what stands for parts of a conversation and for images in any of the families."""
VOCAB_SIZE = 256 + len(TOKENS)


def token_id(name: str) -> int:
    """Return the id of one of ``TOKENS``."""
    return 256 + TOKENS.index(name)


@dataclass(frozen=True)
class WholeVision:
    """Describes one family's checkpoint."""

    image_text: str
    """What stands for an image in a prompt, before it is expanded to a token for each row."""
    image_token: str
    """The token that a row of the tower replaces."""
    entries: dict[str, Any]
    """Of ``config.json``, in place of those of ``CONFIGS``."""
    preprocessor: dict[str, Any]
    """``preprocessor_config.json``"""
    template: str
    """``chat_template.jinja``"""
    processor: dict[str, Any] = field(default_factory=dict)
    """``processor_config.json``"""
    videos: dict[str, Any] = field(default_factory=dict)
    """``video_preprocessor_config.json``; empty: there is none."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """What ``tokenizer_config.json`` calls some of the tokens."""
    embedding_scale: float = 1.0
    """On the random embeddings. Where they are the output layer too, larger ones make a model repeat its last token,
    whatever the image is."""


_SIZES = {"max_position_embeddings": 2048, "num_hidden_layers": 3}
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_EVEN_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes``, of which those of parts change entries of the same part."""
    entries = dict(values)
    for name, change in changes.items():
        entries[name] = merged(entries[name], change) if isinstance(entries.get(name), dict) else change
    return entries


def _template(begin: str, end: str, image: str, answer: str, first: str = "", video: str = "") -> str:
    """Return a chat template: ``begin`` and ``end`` stand around each message, ``image`` and ``video`` for each of its
    images and videos, ``first`` before all messages, and ``answer`` where the next message is to be written."""
    return (
        first
        + "{%- for message in messages -%}"
        + begin
        + "{%- if message['content'] is string %}{{ message['content'] }}{% else -%}"
        + "{%- for part in message['content'] %}{% if part['type'] == 'image' %}{{ '"
        + image
        + (f"' }}}}{{% elif part['type'] == 'video' %}}{{{{ '{video}" if video else "")
        + "' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor -%}"
        + "{%- endif %}{{ '"
        + end
        + "' }}{% endfor -%}"
        + "{%- if add_generation_prompt %}{{ '"
        + answer
        + "' }}{% endif -%}"
    )


_USER_TURNS = _template("{{ message['role'] | upper + ': ' }}", " ", "<image>\\n", "ASSISTANT:")
_CHATML = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
_INSTRUCTIONS = (
    _template(
        "{{ '[INST]' if message['role'] == 'user' }}",
        "",
        "[IMG]",
        "",
        "{{ '<s>' }}",
    )
    .replace("{{ '' }}{% endfor -%}", "{{ '[/INST]' if message['role'] == 'user' else '</s>' }}{% endfor -%}")
    .replace("{%- if add_generation_prompt %}{{ '' }}{% endif -%}", "")
)

_QWEN_IDS = {
    "image_token_id": token_id("<|image_pad|>"),
    "video_token_id": token_id("<|video_pad|>"),
    "vision_start_token_id": token_id("<|vision_start|>"),
    "vision_end_token_id": token_id("<|vision_end|>"),
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VIDEO = _QWEN_IMAGE.replace("image", "video")
_QWEN_TURNS = _template(_CHATML, "<|im_end|>\\n", _QWEN_IMAGE, "<|im_start|>assistant\\n", video=_QWEN_VIDEO)
_IDEFICS_TURNS = _template(
    "{{ message['role'] | capitalize + ':' }}", "<end_of_utterance>\\n", "<image>", "Assistant:", "{{ '<s>' }}"
)
_TILES = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "resample": 1, **_EVEN_COLOURS}
_GRIDS = [[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]


_SMOLVLM_TURNS = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize + ':' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""It has no mark for videos, as that of SmolVLM2 has none."""


def _idefics(name: str, template: str = _IDEFICS_TURNS, **preprocessor: Any) -> WholeVision:
    return WholeVision(
        image_text="<image>",
        image_token="<image>",
        entries={
            "image_token_id": token_id("<image>"),
            "text_config": _SIZES | {"pad_token_id": token_id("<pad>")},
            "vision_config": {"image_size": 56, "patch_size": 7, "max_image_size": {"longest_edge": 56}},
        },
        preprocessor={
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": f"{name}ImageProcessor",
            "processor_class": f"{name}Processor",
            **_TILES,
            **_STEPS,
            **preprocessor,
        },
        processor={"image_seq_len": 16, "processor_class": f"{name}Processor"},
        template=template,
    )


def _lines_of_patches(patch: int, merge: int, **entries: Any) -> WholeVision:
    merges = {} if merge == 1 else {"spatial_merge_size": merge}
    return WholeVision(
        image_text="[IMG]",
        image_token="[IMG]",
        entries={
            "image_token_index": token_id("[IMG]"),
            "text_config": _SIZES,
            "vision_config": {"image_size": 224, "patch_size": patch},
            **entries,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": patch, "width": patch},
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 224},
            **_CLIP_COLOURS,
            **_STEPS,
        },
        processor={
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": patch,
            "processor_class": "PixtralProcessor",
            **merges,
        },
        template=_INSTRUCTIONS,
    )


def _gemma_4(**entries: Any) -> WholeVision:
    names = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "video": "<|video|>"}
    names |= {"audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>"}
    ids = {f"{name}_token_{'index' if name == 'eoa' else 'id'}": token_id(token) for name, token in names.items()}
    return WholeVision(
        image_text="<|image|>",
        image_token="<|image|>",
        entries={
            **ids,
            "text_config": {"max_position_embeddings": 2048, "vocab_size_per_layer_input": VOCAB_SIZE, **entries},
            "vision_config": {"position_embedding_size": 256},
        },
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "max_soft_tokens": 70,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "processor_class": "Gemma4Processor",
            "resample": 3,
            **_STEPS,
            "do_normalize": False,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
        },
        processor={
            "image_seq_length": 70,
            "processor_class": "Gemma4Processor",
            "video_processor": {
                "max_soft_tokens": 70,
                "num_frames": 3,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "resample": 3,
                "video_processor_type": "Gemma4VideoProcessor",
                **_STEPS,
                "image_mean": [0.0, 0.0, 0.0],
                "image_std": [1.0, 1.0, 1.0],
            },
        },
        template=_template(
            "{{ '<|turn>' + message['role'] + '\\n' }}",
            "<turn|>\\n",
            "<|image|>",
            "<|turn>model\\n",
            "{{ '<s>' }}",
            "<|video|>",
        ),
        embedding_scale=0.3,
        tokenizer={f"{name}_token": token for name, token in names.items()},
    )


FAMILIES = {
    "llava": WholeVision(
        image_text="<image>",
        image_token="<image>",
        entries={
            "image_token_index": token_id("<image>"),
            "pad_token_id": token_id("<pad>"),
            "text_config": _SIZES,
            "vision_config": {"image_size": 56},
        },
        preprocessor={
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "size": {"shortest_edge": 56},
            **_CLIP_COLOURS,
            **_STEPS,
        },
        processor={
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
        template=_USER_TURNS,
    ),
    "llava_onevision": WholeVision(
        image_text="<image>",
        image_token="<image>",
        entries={
            "image_grid_pinpoints": _GRIDS,
            "image_token_index": token_id("<image>"),
            "text_config": _SIZES,
            "video_token_index": token_id("<video>"),
            "vision_config": {"image_size": 56},
        },
        preprocessor={
            "do_pad": True,
            "image_grid_pinpoints": _GRIDS,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
            "resample": 3,
            "size": {"height": 56, "width": 56},
            **_EVEN_COLOURS,
            **_STEPS,
        },
        processor={
            "image_token": "<image>",
            "num_image_tokens": 16,
            "processor_class": "LlavaOnevisionProcessor",
            "video_token": "<video>",
            "vision_feature_select_strategy": "full",
        },
        videos={
            "num_frames": 6,
            "resample": 3,
            "size": {"height": 56, "width": 56},
            "video_processor_type": "LlavaOnevisionVideoProcessor",
            **_EVEN_COLOURS,
            **_STEPS,
        },
        template=_template(_CHATML, "<|im_end|>", "<image>", "<|im_start|>assistant\\n", video="<video>"),
    ),
    "idefics3": _idefics("Idefics3"),
    "smolvlm": _idefics(
        "SmolVLM",
        _SMOLVLM_TURNS,
        video_sampling={"fps": 3, "max_frames": 6, "video_size": {"longest_edge": 56}},
    ),
    "qwen2_vl": WholeVision(
        image_text=_QWEN_IMAGE,
        image_token="<|image_pad|>",
        entries=_QWEN_IDS | _SIZES,
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": 64 * 28 * 28,
            "merge_size": 2,
            "min_pixels": 56 * 56,
            "patch_size": 14,
            "processor_class": "Qwen2VLProcessor",
            "temporal_patch_size": 2,
            **_CLIP_COLOURS,
        },
        template=_QWEN_TURNS,
    ),
    "qwen3_vl": WholeVision(
        image_text=_QWEN_IMAGE,
        image_token="<|image_pad|>",
        entries=_QWEN_IDS
        | {
            "text_config": _SIZES,
            "vision_config": {"deepstack_visual_indexes": [0, 1], "depth": 3, "num_position_embeddings": 64},
        },
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "merge_size": 2,
            "patch_size": 16,
            "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": 64 * 32 * 32, "shortest_edge": 64 * 64},
            "temporal_patch_size": 2,
            **_EVEN_COLOURS,
        },
        template=_QWEN_TURNS,
    ),
    "gemma3": WholeVision(
        image_text="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        image_token="<image_soft_token>",
        entries={
            "boi_token_index": token_id("<start_of_image>"),
            "eoi_token_index": token_id("<end_of_image>"),
            "eos_token_id": [token_id("</s>"), token_id("<end_of_turn>")],
            "image_token_index": token_id("<image_soft_token>"),
            "mm_tokens_per_image": 16,
            "text_config": {"num_hidden_layers": 3, "sliding_window": 24, "max_position_embeddings": 2048},
            "vision_config": {"image_size": 112},
        },
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 16,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "size": {"height": 112, "width": 112},
            **_EVEN_COLOURS,
            **_STEPS,
            "do_convert_rgb": None,
        },
        processor={"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        template=_template(
            "{{ '<start_of_turn>' + message['role'] + '\\n' }}",
            "<end_of_turn>\\n",
            "<start_of_image>",
            "<start_of_turn>model\\n",
            "{{ '<s>' }}",
        ),
        embedding_scale=0.1,
        tokenizer={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "gemma4_e2b": _gemma_4(),
    "gemma4_26b_a4b": _gemma_4(),
    "pixtral": _lines_of_patches(16, 1),
    "mistral3": _lines_of_patches(14, 2),
    "internvl": WholeVision(
        image_text="<img><IMG_CONTEXT></img>",
        image_token="<IMG_CONTEXT>",
        entries={
            "image_seq_length": 4,
            "image_token_id": token_id("<IMG_CONTEXT>"),
            "text_config": _SIZES,
            "vision_config": {"image_size": [56, 56]},
        },
        preprocessor={
            "crop_to_patches": False,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "max_patches": 6,
            "min_patches": 1,
            "processor_class": "InternVLProcessor",
            "resample": 3,
            "size": {"height": 56, "width": 56},
            **_CLIP_COLOURS,
            **_STEPS,
        },
        processor={"image_seq_length": 4, "processor_class": "InternVLProcessor"},
        videos={
            "initial_shift": True,
            "num_frames": 6,
            "resample": 3,
            "size": {"height": 56, "width": 56},
            "video_processor_type": "InternVLVideoProcessor",
            **_CLIP_COLOURS,
            **_STEPS,
        },
        template=_template(
            _CHATML,
            "<|im_end|>\\n",
            "<IMG_CONTEXT>\\n",
            "<|im_start|>assistant\\n",
            "{{ '<s>' }}",
            "<video>\\n",
        ),
        tokenizer={
            "context_image_token": "<IMG_CONTEXT>",
            "end_image_token": "</img>",
            "start_image_token": "<img>",
            "video_token": "<video>",
        },
    ),
}
FAMILIES["qwen3_5"] = replace(
    FAMILIES["qwen3_vl"],
    entries=_QWEN_IDS
    | {
        "text_config": {"max_position_embeddings": 2048},
        "vision_config": {"depth": 2, "num_position_embeddings": 64},
    },
)
FAMILIES["qwen3_vl_moe"] = FAMILIES["qwen3_vl"]
FAMILIES["qwen2_5_vl"] = replace(
    FAMILIES["qwen2_vl"],
    entries=FAMILIES["qwen2_vl"].entries | {"vision_config": {"window_size": 56}},
    preprocessor=FAMILIES["qwen2_vl"].preprocessor | {"processor_class": "Qwen2_5_VLProcessor"},
)
"""By the name in ``CONFIGS``."""


def write_whole_vision(kind: str, directory: Path, **entries: Any) -> Path:
    """Write the checkpoint of a family of ``FAMILIES`` under ``directory``. ``entries`` change those of its
    configuration, part by part. Its weights are the same each time."""
    family = FAMILIES[kind]
    config = merged(merged(CONFIGS[kind], family.entries), entries)
    config.pop("vocab_size", None)  # ``write_vision`` sets it where the family has it
    path = write_vision(kind, directory, VOCAB_SIZE, **config)
    _scale_embeddings(path / "model.safetensors", family.embedding_scale)
    ids = {f"{name}_token_id": token_id(token) for name, token in (("bos", "<s>"), ("eos", "</s>"), ("pad", "<pad>"))}
    (path / "generation_config.json").write_text(json.dumps(ids))
    (path / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    if family.processor:
        (path / "processor_config.json").write_text(json.dumps(family.processor))
    if family.videos:
        (path / "video_preprocessor_config.json").write_text(json.dumps(family.videos))
    make_tokenizer(TOKENS, family.tokenizer).save_pretrained(path)
    (path / "chat_template.jinja").write_text(family.template)
    return path


def _scale_embeddings(file: Path, scale: float) -> None:
    tensors = load_file(file)
    scaled = {name: tensor * scale for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")}
    save_file(tensors | scaled, file, {"format": "pt"})


def make_tokenizer(
    tokens: Sequence[str],
    names: dict[str, Any] | None = None,
    *,
    bos: str = "<s>",
    eos: str = "</s>",
    pad: str = "<pad>",
) -> Any:
    """Return a tokenizer whose tokens are single bytes and, behind them, ``tokens``. ``names``: what
    ``tokenizer_config.json`` calls some of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokens])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=bos, eos_token=eos, pad_token=pad, extra_special_tokens=names or None
    )
