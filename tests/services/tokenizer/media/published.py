"""The files of published models that read images: what they say of sizes and tokens, and the same as transformers'
processors have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROWS = tuple(f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7))
TOKENS = (
    *("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<image_soft_token>", "<start_of_image>"),
    *("<end_of_image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<img>"),
    *("</img>", "<IMG_CONTEXT>", "<|image>", "<image|>", "<|image|>", *ROWS),
)
"""Behind the 256 bytes."""


def token_id(token: str) -> int:
    return 256 + TOKENS.index(token)


@dataclass(frozen=True)
class Published:
    """One model."""

    config: Mapping[str, Any]
    images: Mapping[str, Any]
    """``preprocessor_config.json``"""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """``processor_config.json``"""
    rows: Sequence[int] = ()
    """Of an image of each of the sizes of ``SIZES``."""
    processor_class: str = ""
    """Module and class of transformers that writes the image, and the class that scales it."""
    image_class: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Of the processor, beside those of ``processor``."""


SIZES = ((200, 120), (640, 480), (1024, 768), (1024, 1024), (1920, 1080), (90, 1800))
_PINS = [[384 * lines, 384 * columns] for lines in range(1, 7) for columns in range(1, 7)]
_QWEN = {"image_token": "<|image_pad|>"}

MODELS = {
    "llava-1.5-7b-hf": Published(
        {"model_type": "llava", "image_token_index": token_id("<image>"), "vision_config": {"patch_size": 14}},
        {"crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "size": {"shortest_edge": 336}},
        {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        [576] * 6,
        "llava.processing_llava.LlavaProcessor",
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        {"image_token": "<image>"},
    ),
    "llava-onevision-qwen2-7b-ov-hf": Published(
        {"model_type": "llava_onevision", "image_token_index": token_id("<image>")},
        {"image_grid_pinpoints": _PINS, "size": {"height": 384, "width": 384}},
        {"num_image_tokens": 729, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        [1205, 2929, 4725, 7371, 7269, 1809],
        "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        {"image_token": "<image>"},
    ),
    "Qwen2.5-VL-7B-Instruct": Published(
        {"model_type": "qwen2_5_vl", "image_token_id": token_id("<|image_pad|>")},
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        {},
        [28, 391, 999, 1369, 2691, 192],
        "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        _QWEN,
    ),
    "Qwen3-VL-8B-Instruct": Published(
        {
            "model_type": "qwen3_vl",
            "image_token_id": token_id("<|image_pad|>"),
            "vision_config": {"deepstack_visual_indexes": [8, 16, 24]},
        },
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2},
        {},
        [77, 300, 768, 1024, 2040, 168],
        "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        _QWEN,
    ),
    "gemma-3-4b-it": Published(
        {
            "model_type": "gemma3",
            "image_token_index": token_id("<image_soft_token>"),
            "boi_token_index": token_id("<start_of_image>"),
            "eoi_token_index": token_id("<end_of_image>"),
            "mm_tokens_per_image": 256,
        },
        {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None, "image_seq_length": 256},
        {"image_seq_length": 256},
        [256] * 6,
        "gemma3.processing_gemma3.Gemma3Processor",
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        {"full_image_sequence": f"\n\n<start_of_image>{'<image_soft_token>' * 256}<end_of_image>\n\n"},
    ),
    "gemma-4-E4B-it": Published(
        {
            "model_type": "gemma4",
            "image_token_id": token_id("<|image|>"),
            "boi_token_id": token_id("<|image>"),
            "eoi_token_id": token_id("<image|>"),
            "text_config": {"use_bidirectional_attention": "vision"},
        },
        {},
        {"image_processor": {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}},
        [252, 266, 266, 256, 264, 222],
        "gemma4.processing_gemma4.Gemma4Processor",
        "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    ),
    "pixtral-12b": Published(
        {
            "model_type": "llava",
            "image_token_index": token_id("[IMG]"),
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 16},
        },
        {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}},
        {"patch_size": 16, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        [104, 1200, 3072, 4096, 2304, 256],
        "pixtral.processing_pixtral.PixtralProcessor",
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        {"spatial_merge_size": 1},
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": Published(
        {
            "model_type": "mistral3",
            "image_token_index": token_id("[IMG]"),
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        {"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 1540}},
        {
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        [40, 414, 1036, 1369, 1705, 165],
        "pixtral.processing_pixtral.PixtralProcessor",
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    ),
    "InternVL3-8B-hf": Published(
        {"model_type": "internvl", "image_token_id": token_id("<IMG_CONTEXT>"), "image_seq_length": 256},
        {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12},
        {"image_seq_length": 256},
        [1792, 3328, 3328, 2560, 2304, 3328],
        "internvl.processing_internvl.InternVLProcessor",
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"},
    ),
    "Idefics3-8B-Llama3": Published(
        {"model_type": "idefics3", "image_token_id": token_id("<image>")},
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True},
        {"image_seq_len": 169},
        [2197, 2197, 2197, 2873, 2197, 845],
        "idefics3.processing_idefics3.Idefics3Processor",
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>", "image_token": "<image>"},
    ),
    "SmolVLM2-2.2B-Instruct": Published(
        {"model_type": "smolvlm", "image_token_id": token_id("<image>")},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True},
        {"image_seq_len": 64},
        [832, 832, 832, 1088, 832, 320],
        "smolvlm.processing_smolvlm.SmolVLMProcessor",
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        {
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": "<image>",
        },
    ),
}
"""By name at the hub: the entries that decide about sizes, as the published files have them."""
