"""Checks the files of a model before a start: a GGUF file, or a checkpoint's configuration, tokenizer and weights."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenloom.gguf.gguf_file import GGUF_ARCHITECTURES, is_gguf, read_gguf
from tokenloom.gpu_worker.checkpoint.files.config_reader import (
    architecture_of,
    causal_classes,
    is_pickled,
    weight_files,
)
from tokenloom.gpu_worker.checkpoint.quantization.entries import METHODS
from tokenloom.gpu_worker.checkpoint.supported import ARCHITECTURES, BUILT_IN, is_encoder
from tokenloom.model_files.tokenizer_json import has_byte_level_files

from .model_place import check_place
from .small_files import CannotServe, check_content, read_object

__all__ = ["check_checkpoint", "check_place"]


def check_checkpoint(path: Path, model_impl: str = "auto", load_format: str = "auto") -> None:
    """Check the configuration, the weights and the tokenizer of a checkpoint directory or GGUF file.

    With ``load_format`` dummy no weights are needed. Raises `CannotServe`.
    """
    if is_gguf(path):
        if model_impl == "transformers":
            raise CannotServe(f"{path}: GGUF files are not read with --model-impl transformers: leave out that option")
        check_gguf(path)
        return
    config = check_config(path, model_impl)
    if load_format == "auto":
        check_weights(path, config)
    check_tokenizer(path, config)


_KINDS = {
    "adapter": "a LoRA adapter: serve its base model, and load the adapter from a directory of the peft library",
    "mmproj": "the image encoder of a model: serve the file of the language model",
}


def check_gguf(path: Path) -> None:
    """Raise `CannotServe` for a file that is not GGUF, is not whole, or holds no model that can be served."""
    check_content(path)
    try:
        file = read_gguf(path)
    except ValueError as error:
        if "not a valid" in str(error):
            raise CannotServe(f"{path} is cut off or damaged: download it again") from None
        raise CannotServe(str(error) if "merge" in str(error) else f"{error}: download it again") from None
    kind = str(file.metadata.get("general.type", "model"))
    architecture = str(file.metadata.get("general.architecture"))
    if kind != "model" or architecture == "clip":
        reason = _KINDS.get("mmproj" if architecture == "clip" else kind, f"{kind}: serve the file of the model")
        raise CannotServe(f"{path} holds {reason}")
    if architecture not in GGUF_ARCHITECTURES:
        raise CannotServe(
            f"{path}: the architecture {architecture!r} is not read from GGUF files ({', '.join(GGUF_ARCHITECTURES)} "
            "are): serve the model's safetensors checkpoint"
        )
    _check_size(path, max((tensor.offset for tensor in file.tensors.values()), default=0))
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise CannotServe(
            f"{path} has no tokenizer (tokenizer.ggml.tokens): convert the model again with its tokenizer"
        )


def _check_size(path: Path, last_tensor: int) -> None:
    if path.stat().st_size <= last_tensor:
        raise CannotServe(
            f"{path} is cut off: it has {path.stat().st_size:,} bytes, and its last tensor begins at {last_tensor:,}: "
            "download it again"
        )


_COPY = "copy the file from the model's original checkpoint"
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json", "tiktoken.model")
_CONVERT = "run AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers, which writes one"


def check_tokenizer(path: Path, config: Mapping[str, Any]) -> None:
    """Check the tokenizer in a directory against the content of its ``config.json``. Raises `CannotServe`."""
    settings = path / "tokenizer_config.json"
    values = read_object(settings) if settings.exists() or settings.is_symlink() else {}
    file = path / "tokenizer.json"
    if not file.exists() and not file.is_symlink():
        _check_other_files(path, values)
        return
    tokenizer = read_object(file)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise CannotServe(f"{file} is not a tokenizer of the tokenizers library, because it has no model: {_COPY}")
    _check_ids(file, model.get("vocab"), config)


def _check_other_files(path: Path, settings: Mapping[str, Any]) -> None:
    if has_byte_level_files(path, settings):
        return
    found = next((name for name in _SLOW if (path / name).is_file()), None)
    if found is None:
        raise CannotServe(f"{path} has no tokenizer.json: {_COPY}")
    raise CannotServe(f"{path} has no tokenizer.json, only {found}, which is not read: {_CONVERT}")


def _check_ids(file: Path, vocabulary: object, config: Mapping[str, Any]) -> None:
    """Raise `CannotServe` if a token of the vocabulary has no row in the embeddings. Tokens that were added to the
    vocabulary may lack one: texts seldom hold them, and some models come so."""
    size = config.get("vocab_size")
    if not isinstance(vocabulary, dict) or not isinstance(size, int):
        return
    # Only what is sure to fail is refused. Tokens that were added beyond the vocabulary pass, because models are
    # published so.
    highest = max((value for value in vocabulary.values() if isinstance(value, int)), default=0)
    if highest >= size:
        raise CannotServe(
            f"{file} has tokens up to id {highest}, but {file.parent / 'config.json'} says vocab_size {size}: it is "
            f"the tokenizer of another model; {_COPY}"
        )


_AGAIN = "download it again"
_ZIP = b"PK"
_LONGEST_HEADER = 100 << 20
"""What the safetensors library reads at most."""
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
"""Names of the matrix [vocab_size, hidden_size] in checkpoints of the usual families."""


def check_weights(path: Path, config: Mapping[str, Any]) -> None:
    """Check the weights in a directory against ``config``, the content of its ``config.json``. Raises `CannotServe`."""
    _check_index(path)
    _check_unfinished(path)
    try:
        files = weight_files(path)
    except ValueError as error:
        raise CannotServe(str(error) if "missing part" in str(error) else _about_missing(path)) from None
    for file in files:
        if is_pickled(file):
            _check_pickled(file)
        else:
            _check_embeddings(path, file, _read_header(file), config)


def _check_index(path: Path) -> None:
    for index in sorted(path.glob("*.index.json")):
        if index.name not in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            continue
        if (path / index.name.removesuffix(".index.json")).is_file():
            continue
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CannotServe(f"{index} has no weight_map: {_AGAIN}")
        missing = sorted({str(name) for name in shards.values() if not (path / str(name)).exists()})
        if missing:
            raise CannotServe(
                f"{index} names {missing[0]}, which is not in the directory ({len(missing)} of "
                f"{len(set(shards.values()))} files are missing): download the missing files"
            )


def _check_unfinished(path: Path) -> None:
    for pattern in ("*.incomplete", "*.part", "*.crdownload", "*.aria2"):
        if unfinished := sorted(path.glob(pattern)):
            raise CannotServe(
                f"{unfinished[0]} is a download that has not ended: finish it, or download the file again"
            )


def _about_missing(path: Path) -> str:
    links = [file for file in sorted(path.glob("*.safetensors")) if file.is_symlink() and not file.exists()]
    if links:
        return f"{links[0]} is a link to {links[0].readlink()}, which does not exist: download the model again"
    named = sorted({*path.glob("*.safetensors"), *path.glob("*.bin")} - set(path.glob("training_args.bin")))
    if named:
        return f"{path} has no model.safetensors nor an index of several files: rename {named[0].name}, or {_AGAIN}"
    return f"{path} has config.json but no weights: download model.safetensors, or all files that its index names"


def _check_pickled(file: Path) -> None:
    head = check_content(file)
    if not head.startswith(_ZIP):
        raise CannotServe(
            f"{file} is not a file of torch.save since PyTorch 1.6: convert it to safetensors with save_pretrained of "
            "transformers, or download it again"
        )


def _read_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: names, dtypes, shapes and offsets of its tensors.

    Raises `CannotServe`.
    """
    head = check_content(file)
    size = file.stat().st_size
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else size
    if length > min(size, _LONGEST_HEADER):
        raise CannotServe(f"{file} is not a safetensors file, or was cut off in its header: {_AGAIN}")
    with file.open("rb") as stream:
        stream.seek(8)
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CannotServe(
            f"{file} is not a safetensors file: its header is no JSON object of tensors: {_AGAIN}"
        ) from None
    if size < needed:
        raise CannotServe(f"{file} is cut off: it has {size:,} bytes, and its header describes {needed:,}: {_AGAIN}")
    return header


def _check_embeddings(path: Path, file: Path, header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise `CannotServe` if the weights are those of another model than ``config.json`` describes."""
    if architecture_of(config, str(path)) not in ARCHITECTURES:
        return  # others may store embeddings of another size
    for name in _EMBEDDINGS:
        shape = header[name].get("shape") if name in header else None
        hidden = config.get("word_embed_proj_dim") or config.get("hidden_size") or config.get("n_embd")
        wanted = [config.get("vocab_size"), hidden]
        if shape is None or None in wanted or shape == wanted:
            continue
        raise CannotServe(
            f"{file}: {name} is {shape}, but {path / 'config.json'} says vocab_size {wanted[0]} and hidden_size "
            f"{wanted[1]}: take both files from the same checkpoint"
        )


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_TASKS = {
    "ForConditionalGeneration": "it reads images or sound, or has an encoder",
    "ForSequenceClassification": "it classifies texts",
    "ForTokenClassification": "it classifies tokens",
    "ForQuestionAnswering": "it marks answers in texts",
    "ForMaskedLM": "it is an encoder that fills gaps",
    "ForImageClassification": "it classifies images",
    "ForSpeechSeq2Seq": "it writes down speech",
    "EncoderModel": "it is an encoder",
    "Model": "it has no head for text, so it only computes embeddings",
}
"""What classes with such names are for, the longer endings first."""
_ANOTHER = "serve a model whose class ends in ForCausalLM (docs/reference/models.md)"
_INSTALL = "pip install 'tokenloom[transformers]'"


def check_config(path: Path, model_impl: str = "auto") -> dict[str, Any]:
    """Return the content of the ``config.json`` in a checkpoint directory.

    ``model_impl`` is the option of that name. Raises `CannotServe` for a model that no installed code computes.
    """
    file = path / "config.json"
    config = read_object(file)
    try:
        name = architecture_of(config, str(file))
    except ValueError:
        raise CannotServe(
            f"{file} does not name the model's class: set architectures, for example to "
            '["LlamaForCausalLM"], as in the model\'s original checkpoint'
        ) from None
    _check_architecture(file, name, config, model_impl)
    _check_quantization(file, config)
    return config


def _check_architecture(file: Path, name: str, config: dict[str, Any], model_impl: str) -> None:
    if name in BUILT_IN and model_impl != "transformers":
        return
    known = frozenset(causal_classes().values())
    is_served = name in known or (bool(known) and is_encoder(name, config) and not config.get("auto_map"))
    if is_served and model_impl != "native":
        return
    if config.get("is_encoder_decoder") is True:
        raise CannotServe(f"{file}: {name} has an encoder and a decoder, which is not supported: {_ANOTHER}")
    if not name.endswith(_CAUSAL) and name not in known:
        purpose = next((text for ending, text in _OTHER_TASKS.items() if name.endswith(ending)), "it writes no text")
        raise CannotServe(f"{file}: {name} cannot be served ({purpose}): {_ANOTHER}")
    if model_impl == "native":
        raise CannotServe(
            f"{file}: {name} is not built in: leave out --model-impl native, or see docs/reference/models.md"
        )
    if config.get("auto_map"):
        raise CannotServe(
            f"{file}: the code of {name} is in the checkpoint (auto_map) and is never run: use a model of "
            "docs/reference/models.md"
        )
    if not known:
        raise CannotServe(f"{file}: {name} is computed by the package transformers: {_INSTALL}")
    raise CannotServe(
        f"{file}: neither Tokenloom nor the installed transformers has {name}: use a model of "
        "docs/reference/models.md, or install a newer transformers if that has the class"
    )


def _check_quantization(file: Path, config: dict[str, Any]) -> None:
    entry = config.get("quantization_config")
    if entry is None and isinstance(config.get("quantization"), dict):
        raise CannotServe(
            f"{file}: the weights are quantized by MLX (quantization), which is not read: use the model's unquantized "
            "checkpoint or its GGUF file"
        )
    if not entry:
        return
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if method not in METHODS:
        raise CannotServe(
            f"{file}: quantization_config: the method {method!r} is not supported ({', '.join(METHODS)} "
            "are): use the model's unquantized checkpoint, with --quantization int8-dynamic or int4, or its GGUF file"
        )


_PLAIN = (None, "default")
"""Types of rotary positions that do not stretch the context."""


def check_context(path: Path, max_model_len: int | None) -> None:
    """Check ``--max-model-len`` for a checkpoint directory; the engine checks it again, for every kind of model.

    Raises `CannotServe` only for what the engine is sure to refuse: positions that are stretched, and GGUF files, pass.
    """
    if max_model_len is None:
        return
    if max_model_len < 2:
        raise CannotServe(
            f"--max-model-len {max_model_len}: give at least 2, because a request has one token of prompt and one of "
            "output"
        )
    if is_gguf(path):
        return
    config = read_object(path / "config.json")
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or any(not _is_plain(rope) for rope in ropes):
        return
    # The engine refuses it as well, but a whole mesh was started for that, and the refusal came after eleven seconds.
    if max_model_len > length:
        raise CannotServe(
            f"--max-model-len {max_model_len}: the model's context has {length} tokens (max_position_embeddings in "
            f"{path / 'config.json'}): give at most that, or leave out the option"
        )


def _is_plain(rope: object) -> bool:
    """Return whether rotary positions are not stretched, as far as is known: entries by layer kind are not read."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return rope.get("rope_type", rope.get("type")) in _PLAIN
