"""Writes the checkpoints of the matrix, each once: a kind of layers, and a form in which its weights are stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS, FORMATS
from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.parity.embeddings.layouts import LAYOUTS
from tests.parity.reference import add_demo_tokenizer, save_random
from tests.parity.state_checkpoints import write_model
from tests.tokenloom.gguf.demo_file import write_demo_file
from tokenloom.model_files.model_path import DEMO_MODEL

VOCABULARY = 2048
"""That of the demo model, whose drafts and tokenizer the other text models use."""
STORED = {
    "GPTQ": EXPERTS["gptq, zero points"],
    "AWQ": EXPERTS["awq"],
    "FP8": EXPERTS["fp8, by block"],
    "int8 file": FORMATS["w8a8"],
}
_OFTEN = slice(100, 108)
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Files(NamedTuple):
    """Holds the paths of a model."""

    model: Path
    plain: Path
    """The same weights as floats, each layer by itself: what the other gives is compared with what this gives."""


class ModelFiles:
    """Writes checkpoints into a directory when they are first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, base: str, stored: str) -> Files:
        """Return the model of one of ``BASES`` whose weights are stored so; "": as floats. Raises ``KeyError`` if no
        program here writes it."""
        plain = self._once(base, lambda path: _BASES[base](path))
        if not stored:
            return Files(plain, plain)
        if stored == "GGUF":
            if base != "dense":
                raise KeyError(stored)
            return Files(self._once("demo.gguf", write_demo_file), self._once("of GGUF", _plain_of_gguf))
        if base not in ("dense", "window", "experts"):
            raise KeyError(stored)
        both = self._once(f"{base} {stored}", lambda path: formats.write(path, *STORED[stored], source=plain))
        for name in ("quantized", "plain"):
            add_demo_tokenizer(both / name)
        return Files(both / "quantized", both / "plain")

    def adapter(self, base: str) -> Path:
        """Return a LoRA adapter for the model."""
        plain = self.of(base, "").model
        return self._once(f"adapter of {base}", lambda path: _adapter(path, plain))

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self._directory / name
        if not path.exists():
            write(path)
        return path


def _adapter(path: Path, plain: Path) -> None:
    """Write an adapter of the layers that read text: it may not change how images are read."""
    file = save_adapter(path, plain, rank=8) / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "vision_tower" not in name}, file)


def _plain_of_gguf(path: Path) -> None:
    """Write the demo model with the weights that its GGUF file stands for."""
    values = write_demo_file(path.parent / "again.gguf")
    left_out = ("draft", "eagle", "*.py", "__pycache__", "modules.json", "1_Pooling", "2_Dense")  # a file has none
    shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns(*left_out))
    save_file({name: torch.from_numpy(value) for name, value in values.items()}, path / "model.safetensors")


def _dense(path: Path, **entries: Any) -> None:
    path.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"dtype": "float32"} | entries
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.float() for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    add_demo_tokenizer(path)


def _window(path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    windows = {"use_sliding_window": True, "sliding_window": 24, "layer_types": kinds, "max_window_layers": 0}
    _dense(path, tie_word_embeddings=False, **windows)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    _repeat(path)


def _experts(path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    made = save_random("qwen3_moe", path.parent / "made", head_dim=32, norm_topk_prob=True, **sizes, **_SIZES)
    _repeat(made)
    add_demo_tokenizer(made).rename(path)


def _repeat(model: Path) -> None:
    """Make some tokens likelier, of which the layers still decide which: random weights write no token twice within 16,
    so that no draft from the text would be right."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][_OFTEN] *= 3
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def _states(path: Path) -> None:
    written = write_model("qwen3_5_text", path, **_SIZES)
    _repeat(written)
    add_demo_tokenizer(written)


def _images(path: Path) -> None:
    write_whole_vision("llava", path.parent / "made").rename(path)


def _encoder(path: Path) -> None:
    path.mkdir()
    LAYOUTS["bge"].save(path)


_BASES: dict[str, Callable[[Path], None]] = {
    "dense": _dense,
    "window": _window,
    "experts": _experts,
    "states": _states,
    "images": _images,
    "encoder": _encoder,
}
