"""Writes tiny checkpoints of models that read images as a mesh serves them: configuration, weights of decoder and
tower, tokenizer with the tokens that stand for images, what the image processor reads, and a chat template.

The entries of the files are those of the published checkpoints that ``tests/parity/vision_checkpoints.py`` names, of
other sizes; the templates are our own, with the same marks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
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


_SIZES = {"max_position_embeddings": 2048, "num_hidden_layers": 3}
_CLIP_MEANS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes``, of which those of parts change entries of the same part."""
    merged = dict(values)
    for name, change in changes.items():
        merged[name] = _merged(merged[name], change) if isinstance(merged.get(name), dict) else change
    return merged


_SIMPLE_TURNS = """\
{%- for message in messages -%}
{{ message['role'] | upper }}: {% if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for part in message['content'] %}{% if part['type'] == 'image' %}<image>
{% endif %}{% endfor -%}
{%- for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor -%}
{%- endif %} {% endfor -%}
{%- if add_generation_prompt %}ASSISTANT:{% endif -%}
"""

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
            **_CLIP_MEANS,
            **_STEPS,
        },
        processor={
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
        template=_SIMPLE_TURNS,
    ),
}
"""By the name in ``CONFIGS``."""


def write_whole_vision(kind: str, directory: Path, **entries: Any) -> Path:
    """Write the checkpoint of a family of ``FAMILIES`` under ``directory``. ``entries`` change those of its
    configuration, part by part. Its weights are the same each time."""
    family = FAMILIES[kind]
    config = _merged(_merged(CONFIGS[kind], family.entries), entries)
    config.pop("vocab_size", None)  # ``write_vision`` sets it where the family has it
    path = write_vision(kind, directory, VOCAB_SIZE, **config)
    ids = {f"{name}_token_id": token_id(token) for name, token in (("bos", "<s>"), ("eos", "</s>"), ("pad", "<pad>"))}
    (path / "generation_config.json").write_text(json.dumps(ids))
    (path / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    if family.processor:
        (path / "processor_config.json").write_text(json.dumps(family.processor))
    _make_tokenizer().save_pretrained(path)
    (path / "chat_template.jinja").write_text(family.template)
    return path


def _make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single bytes and ``TOKENS``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in TOKENS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
