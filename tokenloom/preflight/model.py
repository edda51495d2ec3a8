"""Checks the files of a model before a start: a GGUF file, or a checkpoint's configuration, tokenizer and weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.gguf.gguf_file import is_gguf, read_gguf
from tokenloom.gguf.tokenizer import check_tokenizer as check_gguf_tokenizer
from tokenloom.gpu_worker.checkpoint.files.architectures import ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.files.config_reader import (
    NoWeights,
    architecture_of,
    is_pickled,
    read_header,
    read_number,
    weight_files,
)
from tokenloom.gpu_worker.checkpoint.files.text_part import text_entries, text_tensor
from tokenloom.gpu_worker.checkpoint.gguf.config import gguf_config
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.checkpoint.quantization.entries import check_kv_scale, reads_kv_scale
from tokenloom.gpu_worker.checkpoint.served_how import ServedHow, divides_kv, served_how
from tokenloom.model_files.sentence_texts import read_modules
from tokenloom.model_files.tokenizer_json import can_make_tokenizer, check_sentence_piece, has_byte_level_files
from tokenloom.services.engine.records.engine_settings import may_find_gpu

from .model_place import check_place
from .small_files import CannotServe, check_content, read_object

__all__ = ["check_checkpoint", "check_place"]


def check_checkpoint(path: Path, options: EngineConfig | None = None) -> ServedHow:
    """Return what computes a checkpoint directory or GGUF file with the ``options`` of an engine.

    Checks its configuration, weights and tokenizer; with ``load_format`` dummy no weights are needed. Raises
    `CannotServe`.
    """
    options = options or EngineConfig()
    if is_gguf(path):
        check_gguf(path)
        return answer(path, options)
    config = text_entries(read_object(path / "config.json"))
    try:
        found = answer(path, options)
    except NoWeights as error:  # which were asked for the dtype; the check of weights knows more about them
        check_weights(path, config)
        raise CannotServe(f"{error}: {_AGAIN}") from None
    if options.worker.load_format == "auto":
        check_weights(path, config)
        _check_kv_scales(path, found, options)
        if options.worker.runner != "generate":
            _check_modules(path)
    check_tokenizer(path, config)
    return found


def answer(path: Path, options: EngineConfig | None = None) -> ServedHow:
    """Return what computes a checkpoint with the ``options`` of an engine. Raises `CannotServe`, or `NoWeights` if only
    the weights can say the dtype."""
    options = options or EngineConfig()
    try:
        return served_how(
            replace(options, worker=replace(options.worker, model=str(path))), has_gpu=may_find_gpu(options)
        )
    except NoWeights:
        raise
    except ValueError as error:
        raise CannotServe(str(error)) from None


_KINDS = {
    "adapter": "a LoRA adapter: serve its base model, and load the adapter from a directory of the peft library",
    "mmproj": "the image encoder of a model: serve the file of the language model",
}


def check_gguf(path: Path) -> None:
    """Raise `CannotServe` for a file that is not GGUF, is not whole, or holds no model that can be served. All files of
    a model are checked."""
    check_content(path)
    try:
        file = read_gguf(path)
    except ValueError as error:
        broken, is_broken, _ = str(error).partition(" is not a valid")
        if is_broken:
            raise CannotServe(f"{broken} is cut off or damaged: download it again") from None
        says_what = " is one of " in str(error) or error.args[0].endswith(": download the model again")
        raise CannotServe(str(error) if says_what else f"{error}: download it again") from None
    kind = str(file.metadata.get("general.type", "model"))
    architecture = str(file.metadata.get("general.architecture"))
    if kind != "model" or architecture == "clip":
        reason = _KINDS.get("mmproj" if architecture == "clip" else kind, f"{kind}: serve the file of the model")
        raise CannotServe(f"{path} holds {reason}")
    for part in file.parts:
        _check_size(part, max((tensor.offset for tensor in file.tensors.values() if tensor.path == part), default=0))
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise CannotServe(
            f"{path} has no tokenizer (tokenizer.ggml.tokens): convert the model again with its tokenizer"
        )
    try:
        gguf_config(path, file)
        check_gguf_tokenizer(file)
    except ValueError as error:
        raise CannotServe(str(error)) from None


def _check_size(path: Path, last_tensor: int) -> None:
    if path.stat().st_size <= last_tensor:
        raise CannotServe(
            f"{path} is cut off: it has {path.stat().st_size:,} bytes, and its last tensor begins at {last_tensor:,}: "
            "download it again"
        )


_COPY = "copy the file from the model's original checkpoint"
_SLOW = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "vocab.json",
    "tiktoken.model",
    "tekken.json",
)
_CONVERT = "run AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers, which writes one"


def check_texts(path: Path) -> None:
    """Check what parts that handle text read of a checkpoint directory or GGUF file. Raises `CannotServe`."""
    if is_gguf(path):
        check_gguf(path)
    else:
        check_tokenizer(path, text_entries(read_object(path / "config.json")))


def check_tokenizer(path: Path, config: Mapping[str, Any]) -> None:
    """Check the tokenizer in a directory against the text model's entries of its ``config.json``. Raises
    `CannotServe`."""
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
    if can_make_tokenizer(path, settings):
        if not has_byte_level_files(path, settings):
            _check_sentence_piece(path, settings)
        return
    found = next((name for name in _SLOW if (path / name).is_file()), None)
    if found is None:
        raise CannotServe(f"{path} has no tokenizer.json: {_COPY}")
    raise CannotServe(f"{path} has no tokenizer.json, only {found}, which is not read: {_CONVERT}")


def _check_sentence_piece(path: Path, settings: Mapping[str, Any]) -> None:
    """Read only the model and not the whole tokenizer: its merges take seconds for a large vocabulary."""
    try:
        check_sentence_piece(path, settings)
    except ValueError as error:
        raise CannotServe(f"{path} has no tokenizer.json, and its {error}: {_CONVERT}") from None


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
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
"""Names of the matrix [vocab_size, hidden_size] in checkpoints of the usual families."""


def check_weights(path: Path, config: Mapping[str, Any]) -> None:
    """Check the weights in a directory against ``config``, the text model's entries of its ``config.json``. Raises
    `CannotServe`."""
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


def _check_kv_scales(path: Path, found: ServedHow, options: EngineConfig) -> None:
    """Check the numbers by which a quantized checkpoint divides keys and values, where they are read. Raises
    `CannotServe`."""
    model = found.config
    if options.cache.dtype != "fp8" or not isinstance(model, ModelConfig) or model.scheme is None:
        return
    if not divides_kv(model):
        return
    for file in weight_files(path):
        header = {} if is_pickled(file) else _read_header(file)
        for name in header:
            if not reads_kv_scale(name) or text_tensor(name) is None:
                continue
            number = read_number(file, header[name])
            try:
                check_kv_scale(name, 1.0 if number is None else number)
            except ValueError as error:
                raise CannotServe(f"{file}: {error}") from None


def _check_modules(path: Path) -> None:
    """Check the weights of the layers that ``modules.json`` lists after the model. Raises `CannotServe`."""
    for module in read_modules(path) or ():
        if module.kind in ("Dense", "LayerNorm"):
            try:
                files = weight_files(module.directory)
            except NoWeights as error:
                raise CannotServe(f"{error}: {_AGAIN}") from None
            for file in files:
                _ = check_content(file) if is_pickled(file) else _read_header(file)


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


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    check_content(file)
    try:
        return read_header(file)
    except NoWeights as error:
        raise CannotServe(f"{error}: {_AGAIN}") from None


def _check_embeddings(path: Path, file: Path, header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise `CannotServe` if the weights are those of another model than ``config.json`` describes."""
    if architecture_of(config, str(path)) not in ARCHITECTURES:
        return  # others may store embeddings of another size
    stored = {text_tensor(name): name for name in header}
    for plain in _EMBEDDINGS:
        name = stored.get(plain, plain)
        shape = header[name].get("shape") if name in header else None
        hidden = config.get("word_embed_proj_dim") or config.get("hidden_size") or config.get("n_embd")
        wanted = [config.get("vocab_size"), hidden]
        if shape is None or None in wanted or shape == wanted:
            continue
        raise CannotServe(
            f"{file}: {name} is {shape}, but {path / 'config.json'} says vocab_size {wanted[0]} and hidden_size "
            f"{wanted[1]}: take both files from the same checkpoint"
        )
