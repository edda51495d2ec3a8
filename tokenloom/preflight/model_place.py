"""Checks that the model which the user named is a checkpoint, and recognizes what users name instead."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenloom.gguf.gguf_file import SUFFIX, is_later_part

from .small_files import CannotServe, check_content, read_object

_WANTED = "give a checkpoint directory, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B"
_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)")
_OLLAMA_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?:[\w.-]+")
_MAGICS = {
    b"PK\x03\x04": "a zip archive or a file of torch.save",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file whose name does not end in .gguf",
    b"ggml": "a file of llama.cpp from before GGUF",
}
_DEEPEST = 2
"""Levels of folders that are searched for a checkpoint."""
_MOST_NAMED = 3


def check_place(model: str, path: Path) -> None:
    """Raise `CannotServe` unless the path is that of a GGUF file or of a directory with a ``config.json``, or the model
    is a name for a hub; ``model`` is what the user wrote."""
    if os.path.isdir(path):
        config = path / "config.json"
        if config.is_symlink() and not config.exists():
            check_content(config)
        if not config.is_file():
            raise CannotServe(_about_directory(path))
        _check_kind(path)
    elif os.path.isfile(path) and path.suffix != SUFFIX:
        raise CannotServe(_about_file(path))
    elif not os.path.isfile(path):
        _check_name(model, path)


def _check_name(model: str, path: Path) -> None:
    if found := _URL.match(model):
        raise CannotServe(f"{model} is a web address: serve the hub id {found['id']}")
    if "://" in model:
        raise CannotServe(f"{model} is a web address: {_WANTED}")
    if _OLLAMA_NAME.fullmatch(model):
        raise CannotServe(f"{model} is a name of Ollama's library: {_WANTED}")
    if os.path.islink(path):
        raise CannotServe(f"{path} is a link to {path.readlink()}, which does not exist: {_WANTED}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(SUFFIX):
        raise CannotServe(f"{path} does not exist: {_WANTED}")


def _about_file(path: Path) -> str:
    head = check_content(path)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return f"{path} holds weights only: serve its directory, {path.parent}, with config.json and the tokenizer"
    kind = next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), "")
    if head.startswith(b"GGUF"):
        return f"{path} is {kind}: link it under one, `ln -s {path} model.gguf`, and serve that"
    if b"vnd.docker.distribution.manifest" in head or b'"layers"' in head:
        return f"{path} is a manifest of Ollama: serve the GGUF blob that it names, linked under a name ending in .gguf"
    return f"{path} is {kind or 'no checkpoint'}: {_WANTED}"


def _about_directory(path: Path) -> str:
    """Return the reason against a directory without ``config.json``."""
    for recognize in (_as_adapter, _as_gguf, _as_other_format, _as_parent, _as_training):
        if reason := recognize(path):
            return reason
    if not any(path.iterdir()):
        return f"{path} is empty: download the model into it, for example with `hf download NAME --local-dir {path}`"
    return f"{path} has no config.json: {_WANTED}"


def _check_kind(path: Path) -> None:
    """Raise `CannotServe` for a directory whose ``config.json`` is not that of a language model with weights."""
    if not any(_weights(path)) and (reason := _as_adapter(path) or _as_other_format(path) or _as_training(path)):
        raise CannotServe(reason)


def _as_adapter(path: Path) -> str:
    file = path / "adapter_config.json"
    if not file.is_file():
        return ""
    base = read_object(file).get("base_model_name_or_path") or "its base model"
    return (
        f"{file}: this is a LoRA adapter of {base}: serve that model with "
        f"--enable-lora --lora-modules {path.name}={path}"
    )


def _as_gguf(path: Path) -> str:
    files = sorted(file.name for file in path.glob(f"*{SUFFIX}") if not is_later_part(file))
    return f"{path} has no config.json: serve one of its GGUF files, {', '.join(files[:_MOST_NAMED])}" if files else ""


def _as_other_format(path: Path) -> str:
    transformers = "download the model's checkpoint in the format of transformers (config.json and safetensors)"
    formats: dict[str, Callable[[Path], str]] = {
        "model_index.json": lambda file: f"{file} describes a pipeline of diffusers, which makes images: {_WANTED}",
        "*.onnx": lambda file: f"{file} is in ONNX format, which is not read: {transformers}",
        "onnx/*.onnx": lambda file: f"{file} is in ONNX format, which is not read: {transformers}",
        "openvino_model.xml": lambda file: f"{file} is in OpenVINO format, which is not read: {transformers}",
        "tf_model.h5": lambda file: f"{file} holds weights of TensorFlow, which are not read: {transformers}",
        "flax_model.msgpack": lambda file: f"{file} holds weights of Flax, which are not read: {transformers}",
        "consolidated*": lambda file: (
            f"{file} is in the format of the model's authors, which is not read: {transformers}"
        ),
        "*.distcp": lambda file: (
            f"{file} is a shard of a training run: merge the shards with "
            "`accelerate merge-weights`, and serve the result"
        ),
        "*_StaticEmbedding": lambda file: (
            f"{file} holds a table of vectors in a folder of its own, which is not read: serve one that has a "
            "config.json beside it, as model2vec saves it"
        ),
        "zero_to_fp32.py": lambda file: (
            f"{file.parent} holds a training run of DeepSpeed: run {file.name} there, and "
            "serve the result with the model's config.json and tokenizer"
        ),
    }
    return next((about(file) for pattern, about in formats.items() for file in sorted(path.glob(pattern))), "")


def _as_parent(path: Path) -> str:
    found = list(_checkpoints_below(path))
    if not found:
        return ""
    shown = " or ".join(str(each) for each in found[:_MOST_NAMED])
    return f"{path} has no config.json, but folders in it do: serve {shown}"


def _as_training(path: Path) -> str:
    names = ("trainer_state.json", "optimizer.pt", "training_args.bin", "scheduler.pt")
    state = next((path / name for name in names if (path / name).is_file()), None)
    if state is None:
        return ""
    return (
        f"{path} has no weights, only the state of a training run ({state.name}): serve the directory that "
        "save_pretrained or the trainer's save_model wrote"
    )


def _checkpoints_below(path: Path) -> Iterator[Path]:
    for depth in range(1, _DEEPEST + 1):
        yield from (file.parent for file in sorted(path.glob("*/" * depth + "config.json")))


def _weights(path: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "pytorch_model*.bin", "model.safetensors.index.json"):
        yield from path.glob(pattern)
