"""Writes the demo model as a GGUF file that also has its tokenizer, its chat template and its ends."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tokenloom.model_files.model_path import DEMO_MODEL

Change = Callable[[gguf.GGUFWriter], object]


def add_tokenizer(writer: gguf.GGUFWriter, template: bool = True) -> None:
    """Add the demo model's vocabulary. Of the format's ways to split a text, "smollm" is nearest to the demo's own: it
    differs only in several spaces before a digit."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    tokens = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens[token_id] for token_id in range(len(tokens))])
    writer.add_token_types([types[token_id] for token_id in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if template:
        writer.add_chat_template((DEMO_MODEL / "chat_template.jinja").read_text())


def write_metadata(path: Path, *changes: Change) -> Path:
    """Write a file of a Qwen3 without tensors, to which ``changes`` have added entries."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for change in changes:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_demo_file(path: Path, kind: Kind = Kind.Q8_0) -> dict[str, np.ndarray]:
    """Return the weights that the file stands for, by Hugging Face's names."""
    return write_demo(path, kind, add_tokenizer)
