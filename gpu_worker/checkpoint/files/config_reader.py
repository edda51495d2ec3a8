"""Reads a checkpoint's ``config.json``, refuses entries that were not read, finds the files of the weights, and reads
their headers. It does not import torch."""

import json
import math
import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .architectures import BUILT_IN, CLASS_OF_TYPE
from .text_part import MediaSwitches, media_switches, text_entries, wrapper_of

# Entries for training, generation defaults (generation_config.json is read separately) and bookkeeping: none of them
# changes a forward pass.
_HARMLESS_NAMES = """
    architectures model_type auto_map dtype torch_dtype transformers_version name_or_path use_cache return_dict
    output_attentions output_hidden_states output_scores torchscript use_bfloat16 gradient_checkpointing
    initializer_range pretraining_tp is_decoder attention_dropout embd_pdrop resid_pdrop attn_pdrop
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences chunk_size_feed_forward suppress_tokens begin_suppress_tokens remove_invalid_values
    exponential_decay_length_penalty return_dict_in_generate tie_encoder_decoder n_ctx reorder_and_upcast_attn
    init_std dropout layerdrop activation_dropout cache_implementation
    matryoshka_dimensions is_matryoshka sentence_transformers sbert_ce_default_activation_function
    max_sequence_length is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """
HARMLESS = frozenset(_HARMLESS_NAMES.split())


IS_CAUSAL = "is_causal"
"""The one entry that the shared code of transformers' classes takes for true where it is absent: false, and null, let
all tokens attend to later ones."""
_GGUF_IS_CAUSAL = ".attention.causal"


# With --model-impl auto, transformers' modules compute such a model if its class reads the entries. Entries that
# neither reads stay refused: without one of its features a model answers nonsense and raises no error.
class UnsupportedError(ValueError):
    """Raised for a valid entry that asks for a feature which the built-in code does not compute."""

    def __init__(self, message: str, unread: Sequence[str] = ()) -> None:
        """``unread``: names of entries that the built-in code does not read; another library may read them."""
        super().__init__(message)
        self.unread = tuple(unread)


MOST_LAYERS = 10_000
"""A damaged file may state any number, for each of which something would be made."""
MOST = 2**31 - 1
"""The largest integer of an entry: sizes and positions beyond it are in damaged files, and some have no float."""


class ConfigReader:
    """Holds a JSON object whose every entry must be read, known to be harmless, or off.

    A model that is loaded without one of its features answers nonsense and raises no error. So :meth:`refuse_rest`
    refuses every entry by name that was not read before.
    """

    def __init__(self, values: Mapping[str, Any], where: str, harmless: frozenset[str] = frozenset()) -> None:
        self._values = dict(values)
        self._where = where
        self._harmless = harmless
        self._taken: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> "ConfigReader":
        """Read the entries of the text model in a directory's ``config.json``. Raises ``ValueError`` if it is missing
        or is not a JSON object."""
        values = _read_json(directory)
        if not isinstance(values, dict):
            raise ValueError(f"{directory / 'config.json'} must hold a JSON object")
        return cls.of_model(text_entries(values), str(directory / "config.json"))

    @classmethod
    def of_model(cls, values: Mapping[str, Any], where: str) -> "ConfigReader":
        """Return a reader of a model's entries, as ``config.json`` names them; ``where`` is the file they are from."""
        return cls(values, where, HARMLESS)

    @property
    def where(self) -> str:
        """Return the file, and the object in it, that the entries are from."""
        return self._where

    def take(self, name: str, default: Any = None) -> Any:
        """Return the raw value, or ``default`` if the entry is absent (a null stays None)."""
        self._taken.add(name)
        return self._values.get(name, default)

    def rename(self, names: Mapping[str, str]) -> None:
        """Take entries by other names than the file has for them."""
        self._values = {names.get(name, name): value for name, value in self._values.items()}

    def take_architecture(self) -> str:
        """Return the name of the model's class (:func:`architecture_of`). Raises ``ValueError``."""
        self._taken.add("architectures")
        return architecture_of(self._values, self._where)

    def take_int(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. An absent or null entry gives ``default``, and an error if that is None too."""
        value = self.take(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "must be a positive integer")
        if value > MOST:
            raise self.error(name, f"must be at most {MOST}")
        return value

    def take_layers(self, name: str, default: int | None = None) -> int:
        """Return a positive number of layers, at most `MOST_LAYERS`; ``default`` as in :meth:`take_int`."""
        if (value := self.take_int(name, default)) > MOST_LAYERS:
            raise self.error(name, f"must be at most {MOST_LAYERS}")
        return value

    def take_count(self, name: str, default: int = 0) -> int:
        """Return a number that may be zero. An absent entry gives ``default``; null is zero."""
        value = self.take(name, default)
        if value is not None and (type(value) is not int or not 0 <= value <= MOST):
            raise self.error(name, f"must be zero or a positive integer of at most {MOST}")
        return value or 0

    def take_float(self, name: str, default: float | None = None) -> float:
        """Return a positive number. An absent or null entry gives ``default``, and an error if that is None too."""
        value = self.take(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "must be a positive number")
        return float(value)

    def take_bool(self, name: str, default: bool) -> bool:
        """Return a boolean. An absent entry gives ``default``; null is false, as the classes that read it take it."""
        value = self.take(name, default)
        value = False if value is None else value
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value

    def take_object(self, name: str, harmless: frozenset[str] = frozenset()) -> "ConfigReader | None":
        """Return a nested object with its own accounting, or None if it is absent, null or empty."""
        value = self.take(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return ConfigReader(value, f"{self._where}: {name}", harmless)

    def refuse_rest(self) -> None:
        """Raise :class:`UnsupportedError` naming the entries that were not read, unless they are harmless, private or
        off. Entries that are on where they are absent are harmless if they are true, and must be read if they are
        not."""
        rest = self._values.keys() - self._taken - self._harmless
        unknown = sorted(name for name in rest if not name.startswith("_") and self._asks(name))
        if unknown:
            features = ", ".join(f"{name} = {brief(self._values[name])}" for name in unknown)
            raise UnsupportedError(f"{self._where}: not supported: {features}", unknown)

    def _asks(self, name: str) -> bool:
        """Return whether an entry that was not read asks for something."""
        value = self._values[name]
        is_on_by_default = name == IS_CAUSAL or name.endswith(_GGUF_IS_CAUSAL)
        return value is not True if is_on_by_default else not _is_off(value)

    def error(self, name: str, wanted: str) -> ValueError:
        """Return the error for an entry with a wrong value."""
        found = brief(self._values[name]) if name in self._values else "nothing"
        return ValueError(f"{self._where}: {name} {wanted}, found {found}")

    def unsupported(self, name: str, wanted: str, *, is_known: bool = True) -> UnsupportedError:
        """Return the error for an entry whose value is valid, but asks for what the built-in code does not compute.

        ``is_known``: the architecture's own class certainly reads the entry.
        """
        return UnsupportedError(str(self.error(name, wanted)), () if is_known else (name,))


def _read_json(directory: Path) -> Any:
    """Return what a directory's ``config.json`` holds. Raises ``ValueError`` if it is missing or no JSON."""
    path = directory / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} has no config.json: not a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


def brief(value: object) -> str:
    """Return a value of ``config.json`` as an error shows it."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_architecture(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the class of the text model and its entries in ``config.json``. Raises ``ValueError``."""
    whole = config_entries(path)
    values, part = text_entries(whole), ": text_config" if wrapper_of(whole) else ""
    return architecture_of(values, f"{path / 'config.json'}{part}"), values


def config_entries(path: Path) -> dict[str, Any]:
    """Return all entries of a directory's ``config.json``; none if it holds no JSON object. Raises ``ValueError``."""
    read = _read_json(path)
    return read if isinstance(read, dict) else {}


def listed_classes(path: Path) -> list[str]:
    """Return the classes that ``architectures`` names in a checkpoint directory. Raises ``ValueError`` without a
    ``config.json``."""
    listed = config_entries(path).get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def read_wrapper(path: Path) -> str | None:
    """Return the class of a checkpoint directory whose text model is one part of several (:func:`wrapper_of`). Raises
    ``ValueError`` if its ``text_config`` is no object."""
    read = _read_json(path) if (path / "config.json").is_file() else None
    values: dict[str, Any] = read if isinstance(read, dict) else {}
    name = wrapper_of(values)
    if name is not None and not isinstance(values.get("text_config", {}), dict | None):
        raise ValueError(f"{path / 'config.json'}: text_config must be an object")
    return name


def read_media(path: Path) -> MediaSwitches | None:
    """Return what images change in the text model of a checkpoint directory, or of anything else; see
    :func:`media_switches`. Raises ``ValueError`` as :func:`read_wrapper`."""
    return media_switches(_read_json(path)) if read_wrapper(path) is not None else None


def architecture_of(values: Mapping[str, Any], where: str) -> str:
    """Return the name of the class that computes a model with these entries, which are from the file ``where``.

    It is the first entry of ``architectures`` that some code here knows, else what ``model_type`` stands for, as in
    vLLM and in transformers' AutoModelForCausalLM. Raises ``ValueError`` if the entries name no class.
    """
    listed = values.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if known := next((name for name in names if name in BUILT_IN or is_class_of_transformers(name)), None):
        return known
    # Code of the checkpoint (auto_map) may compute something else than the type's own class does.
    kind = None if values.get("auto_map") else values.get("model_type")
    by_type = CLASS_OF_TYPE.get(str(kind)) or causal_classes().get(str(kind))
    if by_type or names:
        return by_type or names[0]
    raise ValueError(
        f"{where}: architectures must name the model's class, such as LlamaForCausalLM, or model_type its family, such "
        "as llama"
    )


def causal_classes() -> dict[str, str]:
    """Return the causal language models of the installed transformers by the ``model_type`` of their configurations,
    without importing it, which would take seconds; empty: it is not installed."""
    table = _auto_classes().partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    return dict(re.findall(r'\("([^"]+)", "(\w+)"', table))


def is_class_of_transformers(name: str) -> bool:
    """Return whether the installed transformers has a model's class of this name."""
    return f'"{name}"' in _auto_classes()


@cache
def _auto_classes() -> str:
    """Return the source of transformers' tables of classes; empty: it is not installed."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    source = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    return source.read_text(encoding="utf-8") if source.is_file() else ""


class NoWeights(ValueError):
    """Raised for a file of weights that is missing or cut off, or holds something else."""


_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""safetensors files win: many checkpoints hold both."""
_INDEX_SUFFIX = ".index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint, all of one format. Raises :class:`NoWeights` if one is missing."""
    for single in _SINGLE:
        if (directory / single).is_file():
            return [directory / single]
        if (index := directory / f"{single}{_INDEX_SUFFIX}").is_file():
            return _files_of(index)
    if shards := _shards(directory):
        return shards
    names = " nor ".join(f"{single}[{_INDEX_SUFFIX}]" for single in _SINGLE)
    raise NoWeights(f"{directory} has neither {names}: no weights in a format that is read")


def lacks_index(directory: Path) -> bool:
    """Return whether only the names of a checkpoint's parts show what belongs to it, which transformers does not
    read."""
    return not any((directory / f"{single}{end}").is_file() for single in _SINGLE for end in ("", _INDEX_SUFFIX))


_SHARD = re.compile(r"(model|pytorch_model)-(\d+)-of-(\d+)\.(safetensors|bin)")


def _shards(directory: Path) -> list[Path]:
    """Return the parts of a checkpoint whose index is missing, as their names count them; empty: it has none.

    Raises :class:`NoWeights` naming a part that is missing.
    """
    for ending in ("safetensors", "bin"):
        found = [match for file in sorted(directory.glob(f"*.{ending}")) if (match := _SHARD.fullmatch(file.name))]
        if not found:
            continue
        stem, total, width = found[0][1], found[0][3], len(found[0][2])
        names = [f"{stem}-{number:0{width}}-of-{total}.{ending}" for number in range(1, int(total) + 1)]
        for name in names:
            if not (directory / name).is_file():
                raise NoWeights(f"{directory} has {found[0][0]}, and not {name}: download the missing part")
        return [directory / name for name in names]
    return []


def is_pickled(path: Path) -> bool:
    """Return whether a weight file is one of ``torch.save``, and not a safetensors file."""
    return path.suffix == ".bin"


def _files_of(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise NoWeights(f"{index} must be a JSON object with a weight_map") from None
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise NoWeights(f"{index} names the file {name!r}, which is not in the directory")
    return [index.parent / name for name in names]


_LONGEST_HEADER = 100 << 20
"""What the safetensors library reads at most, in bytes."""


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and offsets of each tensor in a safetensors file, by name. Raises :class:`NoWeights`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size, _LONGEST_HEADER):
            raise NoWeights(f"{file} is not a valid safetensors file, or was cut off in its header")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        needed = 8 + length + max((_end_of(*entry["data_offsets"]) for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise NoWeights(f"{file} is not a valid safetensors file: its header is no JSON object of tensors") from None
    if size < needed:
        raise NoWeights(f"{file} is cut off: it has {size:,} bytes, and its header describes {needed:,}")
    return header


def _end_of(begin: Any, end: Any) -> int:
    """Raises ``ValueError`` or ``TypeError`` for offsets that no tensor has."""
    if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
        raise ValueError
    return end


_NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e"}


def read_number(file: Path, entry: Mapping[str, Any]) -> float | None:
    """Return the only element of a tensor in a safetensors file; NaN: it has none, or several; None: it has a dtype
    that is not read here. ``entry``: the tensor's, of :func:`read_header`."""
    dtype, (begin, end) = entry.get("dtype"), entry["data_offsets"]
    with file.open("rb") as stream:
        stream.seek(8 + struct.unpack("<Q", stream.read(8))[0] + begin)
        stored = stream.read(min(end - begin, 16))
    if dtype == "BF16":
        dtype, stored = "F32", b"\0\0" + stored
    if dtype not in _NUMBERS:
        return None
    form = _NUMBERS[dtype]
    number: float = struct.unpack(form, stored)[0] if len(stored) == struct.calcsize(form) else math.nan
    return number


_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_STORAGES = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
}
"""The classes by which a file of torch.save names dtypes."""


def stored_dtype(directory: Path) -> str:
    """Return the name of the first floating-point tensor's dtype, for a configuration that declares none.

    Raises ``ValueError`` if there are no weights, or their file is damaged.
    """
    file = weight_files(directory)[0]
    if is_pickled(file):
        stored = _pickled_dtypes(file)
    else:
        header = read_header(file)
        stored = [str(header[name].get("dtype")) for name in sorted(header)]
    names = [_STORED_DTYPES.get(dtype, dtype) for dtype in stored]
    return next((name for name in names if name in _STORED_DTYPES.values()), names[0] if names else "float32")


def stored_names(directory: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; of files of torch.save further texts, too. Raises ``ValueError``."""
    names: set[str] = set()
    for file in weight_files(directory):
        names.update(map(str, _pickled(file)) if is_pickled(file) else read_header(file))
    return frozenset(names)


def _pickled(file: Path) -> list[object]:
    """Return the arguments in a file of torch.save, in its order, without running what it holds. Raises
    ``ValueError``."""
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return [argument for _, argument, _ in pickletools.genops(archive.read(name))]
    except (StopIteration, ValueError, zipfile.BadZipFile):
        raise NoWeights(f"{file} is no file of torch.save since PyTorch 1.6") from None


def _pickled_dtypes(file: Path) -> list[str]:
    """Return the dtypes of a file of torch.save, in its order. Raises ``ValueError``."""
    classes = [text.split()[-1] for argument in _pickled(file) if (text := str(argument)).startswith("torch ")]
    return [_STORAGES[each] for each in classes if each in _STORAGES]
