"""Writes the checkpoints of the matrix, each once: a kind of layers, and a form in which its weights are stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.checkpoint.gguf import architectures, state_models
from tests.gpu_worker.checkpoint.gguf.architectures import OSS, WINDOW
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS, FORMATS
from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.parity.embeddings.layouts import LAYOUTS
from tests.parity.reference import add_demo_tokenizer, save_random
from tests.parity.state_checkpoints import make_model, write_model
from tests.tokenloom.gguf.demo_file import add_tokenizer, write_demo_file
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


Bases = frozenset[str]
"""What a model has that the dense one has not."""


class ModelFiles:
    """Writes checkpoints into a directory when they are first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, bases: Bases, stored: str) -> Files:
        """Return the model with these of ``_BASES`` whose weights are stored so; "": as floats. Raises ``KeyError`` if
        no program here writes it."""
        if bases not in _BASES:
            raise KeyError(" and ".join(sorted(bases)))
        name = " ".join(sorted(bases)) or "dense"
        if stored == "GGUF":
            if bases not in _GGUF:
                raise KeyError(stored)
            file = self._once(f"{name}.gguf" if bases else "demo.gguf", _GGUF[bases])
            return Files(file, self._once(f"{name} of GGUF", _PLAIN_OF_GGUF[bases]))
        plain = self._once(name, _BASES[bases])
        if not stored:
            return Files(plain, plain)
        both = self._once(f"{name} {stored}", lambda path: _quantized(path, stored, plain))
        return Files(both / "quantized", both / "plain")

    def adapter(self, bases: Bases) -> Path:
        """Return a LoRA adapter for the model, of its experts too."""
        plain = self.of(bases, "").model
        return self._once(f"adapter of {plain.name}", lambda path: _adapter(path, plain))

    def draft(self, bases: Bases) -> Path:
        """Return a model that drafts for the model: the demo's for the dense one, itself where it can."""
        if not bases:
            return DEMO_MODEL / "draft"
        plain = self.of(bases, "").plain
        if "images" in bases:
            return self._once(f"text of {plain.name}", lambda path: _text_of(path, plain))
        return self._once("small draft", _small_draft) if "states" in bases else plain

    def eagle(self, bases: Bases) -> Path:
        """Return an EAGLE head for the model: the demo's for models with its weights, a random one for others."""
        if bases <= {"window"}:
            return DEMO_MODEL / "eagle"
        plain = self.of(bases, "").plain
        return self._once(f"EAGLE head of {plain.name}", lambda path: _eagle(path, plain))

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self._directory / name
        if not path.exists():
            write(path)
        return path


def _quantized(path: Path, stored: str, plain: Path) -> None:
    """Write a model quantized and as the floats that it then has."""
    towers = ("vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector")
    formats.write(path, *STORED[stored], source=plain, skipped=towers)
    for name in ("quantized", "plain"):
        for each in plain.iterdir():
            if not (path / name / each.name).exists():
                (shutil.copytree if each.is_dir() else shutil.copy)(each, path / name / each.name)


def _adapter(path: Path, plain: Path) -> None:
    """Write an adapter of the layers that read text: it may not change how images are read."""
    file = save_adapter(path, plain, rank=8, has_experts=True) / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "vision_tower" not in name}, file)


def _text_of(path: Path, plain: Path) -> None:
    """Write the text part of a model that reads images."""
    path.mkdir()
    config = json.loads((plain / "config.json").read_text())["text_config"]
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    named = {name: value for name, value in load_file(plain / "model.safetensors").items() if "vision" not in name}
    text = {
        name.replace("model.language_model.", "model.").replace("language_model.", ""): value
        for name, value in named.items()
        if "language_model" in name or name.startswith("lm_head")
    }
    save_file(text, path / "model.safetensors", {"format": "pt"})


def _small_draft(path: Path) -> None:
    made = save_random(
        "qwen3", path.parent / "made", head_dim=16, tie_word_embeddings=False, max_position_embeddings=4096, **_SIZES
    )
    _repeat(made)
    made.rename(path)


def _eagle(path: Path, plain: Path) -> None:
    """Write an EAGLE head of random weights, whose likeliest tokens are those of the model, as it has its output
    layer."""
    path.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config = config.get("text_config", config)
    size, head = int(config["hidden_size"]), json.loads((DEMO_MODEL / "eagle/config.json").read_text())
    same = ("hidden_size", "vocab_size", "max_position_embeddings")
    head |= {name: config[name] for name in same}
    (path / "config.json").write_text(json.dumps(head))
    generator, demo = torch.Generator().manual_seed(3), 256
    sizes = {demo: size, 2 * demo: 2 * size}  # the demo's states, and those beside embeddings
    tensors = {
        name: torch.randn([sizes.get(count, count) for count in value.shape], generator=generator) / size**0.5
        for name, value in load_file(DEMO_MODEL / "eagle/model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


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


def _encoder(path: Path) -> None:
    path.mkdir()
    LAYOUTS["bge"].save(path)


def _experts_of_windows(path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    made = save_random("mixtral", path.parent / "made", **sizes, **_SIZES)
    _repeat(made)
    add_demo_tokenizer(made).rename(path)


def _experts_of_states(path: Path) -> None:
    written = write_model("qwen3_next", path, **_SIZES)
    _repeat(written)
    add_demo_tokenizer(written)


def _vision(kind: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_whole_vision(kind, path.parent / "made").rename(path)

    return write


_BASES: dict[Bases, Callable[[Path], None]] = {
    frozenset(): _dense,
    frozenset({"window"}): _window,
    frozenset({"experts"}): _experts,
    frozenset({"states"}): _states,
    frozenset({"images"}): _vision("llava"),
    frozenset({"encoder"}): _encoder,
    frozenset({"experts", "window"}): _experts_of_windows,
    frozenset({"experts", "states"}): _experts_of_states,
    frozenset({"experts", "images"}): _vision("qwen3_vl_moe"),
    frozenset({"images", "window"}): _vision("gemma3"),
    frozenset({"images", "states"}): _vision("qwen3_5"),
}


def _gguf_of_windows(path: Path) -> Any:
    model = architectures.make("gemma3_text", **WINDOW | {"sliding_window": 24, "num_hidden_layers": 7}, **_SIZES)
    architectures.write_model(path, "gemma3", model, Kind.Q8_0, add_tokenizer)
    return model


def _gguf_of_experts(path: Path) -> Any:
    model = architectures.make("gpt_oss", **OSS, **_SIZES)
    architectures.write_model(path, "gpt-oss", model, Kind.Q8_0, add_tokenizer)
    return model


def _gguf_of_states(path: Path) -> Any:
    # Value heads as large as a block: one that lay in two heads would be rounded otherwise in the file's order.
    model = make_model("qwen3_5_text", **_SIZES, linear_value_head_dim=32)
    state_models.write(path, "qwen35", model, Kind.Q8_0, change=add_tokenizer)
    return model


def _plain_of(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return what writes the model whose numbers a GGUF file stands for."""

    def plain(path: Path) -> None:
        write(path.with_suffix(".again")).save_pretrained(path)
        add_demo_tokenizer(path)

    return plain


def _gguf_of_an_encoder(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "bert")
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


_GGUF: dict[Bases, Callable[[Path], object]] = {
    frozenset(): write_demo_file,
    frozenset({"window"}): _gguf_of_windows,
    frozenset({"experts"}): _gguf_of_experts,
    frozenset({"states"}): _gguf_of_states,
    frozenset({"images"}): write_demo_file,  # which reads text alone: towers are in files of their own
    frozenset({"encoder"}): _gguf_of_an_encoder,
}
_PLAIN_OF_GGUF: dict[Bases, Callable[[Path], None]] = {
    frozenset(): _plain_of_gguf,
    frozenset({"window"}): _plain_of(_gguf_of_windows),
    frozenset({"experts"}): _plain_of(_gguf_of_experts),
    frozenset({"states"}): _plain_of(_gguf_of_states),
    frozenset({"images"}): _vision("llava"),
    frozenset({"encoder"}): _encoder,
}
