"""Writes tiny checkpoints of models that hear, as a mesh serves them: configuration, weights of decoder and tower,
tokenizer, what the feature extractor reads, and a chat template where the model chats.

The entries of the files are those of the published Qwen2-Audio-7B-Instruct, of other sizes; the template is our own,
with the same marks. Whisper's are in :mod:`.whisper_checkpoint`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.checkpoints.whisper_checkpoint import RATE, write_whisper
from tests.checkpoints.whole_vision import make_tokenizer, merged

QWEN2_AUDIO_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
)
"""Behind the 256 bytes."""
AUDIO_ID = 256 + QWEN2_AUDIO_TOKENS.index("<|AUDIO|>")
"""The token of Qwen2-Audio that a row of the tower replaces."""
_QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "d_model": 32,
        "dropout": 0.0,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 2,
        "initializer_range": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 32,
        "scale_embedding": False,
    },
    "audio_token_index": AUDIO_ID,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 256,
        "eos_token_id": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "torch_dtype": "float32",
        "use_mrope": False,
        "vocab_size": 256 + len(QWEN2_AUDIO_TOKENS),
    },
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 256 + len(QWEN2_AUDIO_TOKENS),
}
_QWEN2_AUDIO_TURNS = """
{%- set heard = namespace(count=0) -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] %}{% if part['type'] == 'audio' %}{% set heard.count = heard.count + 1 -%}
{{ 'Audio ' ~ heard.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor -%}
{%- endif %}{{ '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
""".strip()


def _write_qwen2_audio(path: Path, **entries: Any) -> None:
    config = merged(_QWEN2_AUDIO, entries)
    (path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForMultimodalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    _randomize(model)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))  # spelled as it is published
    ids = {"bos_token_id": 256, "eos_token_id": [258, 256], "pad_token_id": 256}
    (path / "generation_config.json").write_text(json.dumps(ids))
    extractor = {
        "chunk_length": 30,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["audio_config"]["num_mel_bins"],
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": "Qwen2AudioProcessor",
        "return_attention_mask": True,
        "sampling_rate": RATE,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(extractor))
    made = make_tokenizer(QWEN2_AUDIO_TOKENS, bos="<|endoftext|>", eos="<|im_end|>", pad="<|endoftext|>")
    made.save_pretrained(path)
    (path / "chat_template.jinja").write_text(_QWEN2_AUDIO_TURNS)


WRITERS: dict[str, Callable[..., None]] = {"qwen2_audio": _write_qwen2_audio, "whisper": write_whisper}
"""By the ``model_type``."""


def write_whole_sound(kind: str, directory: Path, **entries: Any) -> Path:
    """Write the checkpoint of one of ``WRITERS`` under ``directory``. ``entries`` change those of its configuration,
    part by part. Its weights are the same each time."""
    path = directory / kind
    path.mkdir(parents=True)
    torch.manual_seed(7)
    WRITERS[kind](path, **entries)
    return path


def _randomize(model: Any) -> None:
    """Make weights with which tokens depend on all that stands before them, and so on each sound."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # the tower's positions are not learned
                is_norm = parameter.dim() == 1 and "norm" in name
                parameter.normal_(float(is_norm), 0.1 if parameter.dim() == 1 else 0.3)


def load_sound(path: Path) -> Any:
    """Return the model as transformers loads it. Raises ``AssertionError`` if a tensor is missing or left over."""
    model, report = transformers.AutoModelForMultimodalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def sound(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return a sound of tones and noise, other ones for each seed."""
    random, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in random.uniform(80, 4000, 4))
    return (0.1 * tones + 0.02 * random.standard_normal(len(time))).astype(np.float32)
