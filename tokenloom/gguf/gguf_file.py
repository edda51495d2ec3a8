"""Reads the head of a GGUF file, or of all files of a model that was split: metadata and the places of tensors.

The head of a model with 150,000 tokens has half a million values, and every process of a mesh that needs the tokenizer
reads it; so numbers of an array are read at once, and the tensors' content not at all.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {kind: code for kind, code in enumerate("BbHhIif?  Qqd") if code != " "}
"""The format's types of numbers by their id, as codes of ``struct``."""

GGUF_ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen2moe": ("Qwen2MoeForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "gemma4": ("Gemma4ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "gpt-oss": ("GptOssForCausalLM",),
    "deepseek2": ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
    "olmo2": ("Olmo2ForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "glm4": ("Glm4ForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "qwen35": ("Qwen3_5ForCausalLM",),
    "qwen35moe": ("Qwen3_5MoeForCausalLM",),
    "qwen3next": ("Qwen3NextForCausalLM",),
    "granitehybrid": ("GraniteMoeHybridForCausalLM",),
    "falcon-h1": ("FalconH1ForCausalLM",),
    "kimi-linear": ("KimiLinearForCausalLM",),
    "mamba2": ("Mamba2ForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "mistral3": ("Ministral3ForCausalLM", "MistralForCausalLM"),
}
"""The classes that are read from GGUF files, by ``general.architecture``; of two, the file's other entries say which.
Files of earlier Mistrals say llama."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Describes a tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Outputs first, as in PyTorch; the file stores the sizes in reverse."""
    kind: int
    """The id of the type of its numbers or blocks."""
    offset: int
    """Where its bytes begin in the file."""
    path: Path
    """The file, one of :attr:`GgufFile.parts`."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Holds the head of a model's file, or of all its files."""

    path: Path
    """The file with the metadata: the first of :attr:`parts`."""
    metadata: dict[str, Any]
    """By key: a number, a boolean, a string, or a list of them."""
    tensors: dict[str, GgufTensor]
    spans: dict[str, tuple[int, int]]
    """Where each key's entry begins and ends in :attr:`path`, in bytes."""
    parts: tuple[Path, ...]


def is_gguf(path: Path) -> bool:
    """Return whether a model's path is that of a GGUF file."""
    return path.suffix == SUFFIX


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_later_part(path: Path) -> bool:
    """Return whether a file is one of several of a model, and not the first, which is the one to name."""
    match = _PART.fullmatch(path.name)
    return match is not None and int(match[2]) != 1


def whole_stem(path: Path) -> str:
    """Return the name of a file without its ending and without its number among the files of a model."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that a file belongs to, as their names count them, whether they are there or not;
    a file whose name has no count is the only one."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    return tuple(path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, int(match[3]) + 1))


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file, and those of the other files if it is one of several of a model.

    Raises ``ValueError`` naming the file if it is not GGUF or is cut off, or a part of its model that is missing, and
    ``OSError`` if it cannot be read.
    """
    parts = gguf_parts(path)
    if _PART.fullmatch(path.name) is None:
        head = _read_one(path)
        if (count := head.metadata.get("split.count", 1)) > 1:
            raise ValueError(
                f"{path} is one of {count} files of a model and was renamed: name each as llama-gguf-split did, such "
                f"as model-00001-of-{count:05}.gguf"
            )
        return head
    for part in parts if path.is_file() else ():
        if not part.is_file():
            raise ValueError(f"{path} is one of {len(parts)} files of a model, and {part} is missing: download it too")
    heads = [_read_one(part) for part in parts]
    for number, head in enumerate(heads):
        _check_part(head, number, len(parts))
    tensors = {name: tensor for head in heads for name, tensor in head.tensors.items()}
    if (wanted := heads[0].metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ValueError(
            f"{path}: its {len(parts)} files have {len(tensors)} tensors, split.tensors.count is {wanted}: download "
            "the model again"
        )
    return replace(heads[0], tensors=tensors, parts=parts)


def _check_part(head: GgufFile, number: int, count: int) -> None:
    found = head.metadata.get("split.no", number), head.metadata.get("split.count", count)
    if found != (number, count):
        raise ValueError(
            f"{head.path} says that it is number {found[0]} of {found[1]} files (split.no, split.count), and its name "
            f"that it is number {number} of {count}: download the model again"
        )


def _read_one(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                head = _Head(content, path)
                return head.read()
            except (struct.error, IndexError, OverflowError, MemoryError) as error:
                raise ValueError(f"{path} is not a valid GGUF file: {error}") from None


class _Head:
    """Reads values one after the other."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content = content
        self._path = path
        self._at = len(_MAGIC)

    def read(self) -> GgufFile:
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            raise ValueError(f"{self._path}: version {version} of GGUF is not supported: must be 2 or 3, little-endian")
        # Read here, not with the package gguf, which makes an array of every token: for 150,000 tokens with as many
        # merges it takes 8.7 s and 475 MB more in each process that needs the tokenizer. This takes 0.31 s.
        num_tensors, num_entries = self._unpack("<QQ")
        metadata, spans = {}, {}
        for _ in range(num_entries):
            begin = self._at
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
            spans[key] = (begin, self._at)
        parts = metadata.get("split.count", 1)
        if type(parts) is not int:
            raise ValueError(f"{self._path}: split.count must be an integer, found {parts!r:.40}")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"{self._path}: general.alignment must be a positive integer, found {alignment!r}")
        tensors = list(self._tensors(num_tensors))
        start = -(-self._at // alignment) * alignment
        placed = {each.name: replace(each, offset=start + each.offset) for each in tensors}
        return GgufFile(self._path, metadata, placed, spans, (self._path,))

    def _tensors(self, count: int) -> Iterator[GgufTensor]:
        for _ in range(count):
            name = self._string()
            (num_dimensions,) = self._unpack("<I")
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"{self._path}: {name} has {num_dimensions} dimensions; 1 to 4 are valid")
            sizes = self._unpack(f"<{num_dimensions}Q")
            kind, offset = self._unpack("<IQ")
            yield GgufTensor(name, tuple(reversed(sizes)), kind, offset, self._path)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._unpack("<IQ")
            if element == _STRING:
                self._room(8 * count)
                return [self._string() for _ in range(count)]
            return self._numbers(element, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"{self._path}: a value of the unknown type {kind} at byte {self._at}")
        self._room(count * struct.calcsize(_NUMBERS[kind]))  # before a number of values that no memory could hold
        return list(self._unpack(f"<{count}{_NUMBERS[kind]}"))

    def _string(self) -> str:
        size = self._room(self._unpack("<Q")[0])
        text = self._content[self._at : self._at + size].decode("utf-8", "replace")
        self._at += size
        return text

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return values

    def _room(self, size: int) -> int:
        """Return ``size``, if the file still has that many bytes."""
        if size > len(self._content) - self._at:
            raise IndexError(f"it ends before a value of {size} bytes at byte {self._at}")
        return size
