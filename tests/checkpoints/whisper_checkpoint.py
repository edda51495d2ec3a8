"""Writes a tiny checkpoint of Whisper: configuration, weights of decoder and tower, tokenizer, what the feature
extractor reads, and the entries of generation that say what may be written.

The entries of the files are those of the published checkpoints, of other sizes.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

RATE = 16_000
"""Samples a second."""
PIECE_SECONDS = 30
"""Of sound that Whisper's tower turns into rows."""
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""A character for each byte: the ids of text."""
_NAMES = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES if code != "yue"),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
"""The special tokens of Whisper's first multilingual checkpoints, in their order; moments of time follow."""
_TIMESTAMPS = tuple(f"<|{index * 0.02:.2f}|>" for index in range(PIECE_SECONDS * 50 + 1))
WHISPER_VOCAB_SIZE = 256 + len(_NAMES) + len(_TIMESTAMPS)


def whisper_id(name: str) -> int:
    """Return the id of one of Whisper's special tokens, ``<|0.00|>`` and other moments among them."""
    return 256 + (_NAMES + _TIMESTAMPS).index(name)


ALIGNMENT_HEADS = [[1, 0], [2, 1], [2, 3]]
"""(layer, head) of those by whose attention words are timed."""
WHISPER_CONFIG = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "apply_spec_augment": False,
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [_ALPHABET.index("Ġ"), whisper_id("<|endoftext|>")],
    "bos_token_id": whisper_id("<|endoftext|>"),
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 3,
    "decoder_start_token_id": whisper_id("<|startoftranscript|>"),
    "dropout": 0.0,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": whisper_id("<|endoftext|>"),
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "median_filter_width": 7,
    "model_type": "whisper",
    "num_hidden_layers": 2,
    "num_mel_bins": 80,
    "pad_token_id": whisper_id("<|endoftext|>"),
    "scale_embedding": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": WHISPER_VOCAB_SIZE,
}
_WHISPER_GENERATION = {
    "alignment_heads": ALIGNMENT_HEADS,
    "begin_suppress_tokens": WHISPER_CONFIG["begin_suppress_tokens"],
    "bos_token_id": whisper_id("<|endoftext|>"),
    "decoder_start_token_id": whisper_id("<|startoftranscript|>"),
    "eos_token_id": whisper_id("<|endoftext|>"),
    "forced_decoder_ids": [[1, None], [2, whisper_id("<|transcribe|>")]],
    "is_multilingual": True,
    "lang_to_id": {name: whisper_id(name) for name in _NAMES[2 : _NAMES.index("<|translate|>")]},
    "max_initial_timestamp_index": 50,
    "max_length": 448,
    "no_timestamps_token_id": whisper_id("<|notimestamps|>"),
    "pad_token_id": whisper_id("<|endoftext|>"),
    "prev_sot_token_id": whisper_id("<|startofprev|>"),
    "return_timestamps": False,
    # Marks of punctuation, and what stands for parts of a transcript.
    "suppress_tokens": [*range(2, 5), *(whisper_id(name) for name in (_NAMES[1], *_NAMES[-6:-1]))],
    "task_to_id": {task: whisper_id(f"<|{task}|>") for task in ("transcribe", "translate")},
}
_WHISPER_FEATURES = {
    "chunk_length": PIECE_SECONDS,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": PIECE_SECONDS * RATE,
    "nb_max_frames": PIECE_SECONDS * 100,
    "padding_side": "right",
    "padding_value": 0.0,
    "processor_class": "WhisperProcessor",
    "return_attention_mask": False,
    "sampling_rate": RATE,
}


def write_whisper(path: Path, **entries: Any) -> None:
    """Write the checkpoint into the folder ``path``; ``entries`` replace those of its configuration."""
    config = WHISPER_CONFIG | entries
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(_WHISPER_GENERATION))
    (path / "preprocessor_config.json").write_text(json.dumps(_WHISPER_FEATURES))
    torch.manual_seed(11)
    model = transformers.WhisperForConditionalGeneration(transformers.AutoConfig.from_pretrained(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))  # spelled as it is published
    (path / "generation_config.json").write_text(json.dumps(_WHISPER_GENERATION))
    _whisper_tokenizer().save_pretrained(path)


def _fill(name: str, parameter: torch.Tensor) -> None:
    """Draw weights with which a transcript depends on the sound and on what is written, and ends."""
    if "encoder.embed_positions" in name:
        return  # sines, which are fixed
    if "norm" in name:
        is_weight = name.endswith("weight")
        parameter.normal_(float(is_weight), 0.1 if is_weight else 0.02)
    elif "embed_positions" in name:
        parameter.normal_(0.0, 0.6)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 0.3)
        parameter[whisper_id("<|endoftext|>")] *= 1.6
        # Random logits of many tokens that are no text would outweigh those of text.
        parameter[whisper_id("<|startoftranscript|>") :] *= 0.3
        parameter[whisper_id("<|0.00|>") :] *= 1.5
    elif "encoder_attn" in name and parameter.dim() > 1:
        parameter.normal_(0.0, 1.0 if "q_proj" in name or "k_proj" in name else 0.2)
    else:
        parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else 0.3)


def _whisper_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single bytes and the special ones."""
    vocab = {character: index for index, character in enumerate(_ALPHABET)}
    vocab["<|endoftext|>"] = 256
    made = transformers.WhisperTokenizer(vocab=vocab, merges=[])
    added = [transformers.AddedToken(name, special=True, normalized=False) for name in _NAMES]
    made.add_special_tokens({"additional_special_tokens": added})
    made.add_tokens([transformers.AddedToken(name, special=False, normalized=False) for name in _TIMESTAMPS])
    return made
