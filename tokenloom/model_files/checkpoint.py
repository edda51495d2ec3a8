"""Reads the files of a model except for the weights: tokenizer, end tokens, defaults, fingerprints; GGUF files too."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenloom.process import cache_directory

from ..gguf import tokenizer
from ..gguf.gguf_file import GgufFile, gguf_parts, is_gguf, read_gguf
from ..request import validation
from ..request.errors import InvalidArgument, NotFound, TokenloomError
from ..request.narrowing import narrow_sampling
from ..request.sampling_params import CHECKPOINT_NAMES
from ..v1 import types_pb2
from .model_path import weight_paths
from .sentence_texts import LIMIT_FILES, PROMPT_FILES, SentenceTexts, read_sentence_texts
from .tokenizer_json import (
    SENTENCE_PIECE_FILES,
    VOCABULARY_FILES,
    can_make_tokenizer,
    has_byte_level_files,
    make_byte_level_tokenizer,
    make_sentence_piece_tokenizer,
    save_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

Stamp = tuple[str, int, int, int, int]
T = TypeVar("T")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *LIMIT_FILES,
)
_ALL_FILES = (*_TOKENIZER_FILES, *VOCABULARY_FILES, *SENTENCE_PIECE_FILES)
"""Those of a checkpoint without a ``tokenizer.json``."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class CheckpointInfo:
    """Describes a checkpoint except for its weights.

    Attributes:
        path: The directory, or the GGUF file.
        eos_token_ids: Ids that end a generation, ascending: those of ``generation_config.json``, as in transformers; if
            it names none, those of ``config.json`` and of the tokenizer.
        default_sampling_params: Defaults of ``generation_config.json`` for requests that do not set a parameter.
        chat_template: The template's text; empty: none.
        special_tokens: ``bos_token`` and the like, by name, as templates see them.
        vector_texts: How sentence-transformers treats texts that become vectors; None: the checkpoint has no such
            files.
    """

    path: Path
    eos_token_ids: tuple[int, ...]
    default_sampling_params: types_pb2.SamplingParams = field(default_factory=types_pb2.SamplingParams)
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    vector_texts: SentenceTexts | None = None

    @classmethod
    def load(cls, path: Path) -> "CheckpointInfo":
        """Read the JSON files of a checkpoint, or the metadata of a GGUF file.

        Raises ``InvalidArgument`` for a broken one.
        """
        if is_gguf(path):
            ends, template, tokens = load_gguf_description(path)
            return cls(path=path, eos_token_ids=ends, chat_template=template, special_tokens=tokens)
        config, generation = _read_json(path / "config.json"), _read_json(path / "generation_config.json")
        tokenizer = _read_json(path / "tokenizer_config.json")
        tokens = _special_tokens(path, tokenizer)
        chosen = _eos(path / "generation_config.json", generation)
        text = config.get("text_config") if config.get("eos_token_id") is None else None
        declared = _eos(path / "config.json", text if isinstance(text, dict) else config)
        return cls(
            path=path,
            # As in transformers, generation_config.json decides alone if it names any. If it lacks its chat's end
            # token, a request adds it with stop_token_ids.
            eos_token_ids=chosen or tuple(sorted({*declared, *_eos_of_tokenizer(path, tokens)})),
            default_sampling_params=_sampling_defaults(path, generation),
            chat_template=_chat_template(path, tokenizer, config.get("model_type")),
            special_tokens=tokens,
            vector_texts=_vector_texts(path),
        )


IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that say how a checkpoint's images are prepared; a model that reads images has one of them."""
VIDEO_FILE = "video_preprocessor_config.json"
"""Says how its videos are prepared, where the others do not."""
_SOUND_TYPES = ("whisper", "qwen2_audio")
"""Models whose towers of sounds are computed."""


def reads_images(path: Path) -> bool:
    """Return whether a checkpoint has a tower for images, and the files that say how they are prepared."""
    return any((path / name).is_file() for name in IMAGE_FILES) and "vision_config" in _read_json(path / "config.json")


def reads_sounds(path: Path) -> bool:
    """Return whether a checkpoint has a tower for sounds that is computed, and what says how they are prepared."""
    has_files = any((path / name).is_file() for name in IMAGE_FILES)
    return has_files and _read_json(path / "config.json").get("model_type") in _SOUND_TYPES


def load_tokenizer(path: Path) -> "Tokenizer":
    """Return the fast tokenizer, with the tokens that other files of the checkpoint add to it.

    Raises ``NotFound`` without a tokenizer.json, the files of GPT-2's tokenizer or a tokenizer.model, and
    ``InvalidArgument`` for broken files or tokens that do not fit them.
    """
    if is_gguf(path):
        return load_gguf_tokenizer(path)
    tokenizer = _read_tokenizer(path)
    # Files may hold a length that training used, as that of all-MiniLM-L6-v2; each caller decides about it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, path)
    texts = _vector_texts(path)
    if texts is not None and texts.lowers:
        _lower(tokenizer)
    return tokenizer


def _vector_texts(path: Path) -> SentenceTexts | None:
    try:
        return read_sentence_texts(path)
    except ValueError:
        return None  # the engine refuses it by name, unless it only generates


def _lower(tokenizer: "Tokenizer") -> None:
    """Let the tokenizer read every text in lower case."""
    from tokenizers import normalizers

    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def _read_tokenizer(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        return _made_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # the library panics on some files, which raises no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InvalidArgument(f"model {path.name!r}: tokenizer.json cannot be read: {error}", "model") from None
    return tokenizer


def _made_tokenizer(path: Path) -> "Tokenizer":
    config = _read_json(path / "tokenizer_config.json")
    if not can_make_tokenizer(path, config):
        raise NotFound(f"model {path.name!r}: no tokenizer.json (only fast tokenizers are supported)", field="model")
    try:
        make = make_byte_level_tokenizer if has_byte_level_files(path, config) else make_sentence_piece_tokenizer
        return make(path, config, _special_tokens(path, config))
    except ValueError as error:
        raise InvalidArgument(f"model {path.name!r}: {error}", "model") from None


def tokenizer_file(path: Path) -> Path | None:
    """Return the ``tokenizer.json`` of a checkpoint, which is a cached copy if other files hold the tokenizer; None if
    it has no tokenizer."""
    if is_gguf(path):
        return save_gguf_tokenizer(path)
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if can_make_tokenizer(path, _read_json(path / "tokenizer_config.json")):
        return save_tokenizer(load_tokenizer(path), path)
    return None


def tokenizer_fingerprint(path: Path) -> bytes:
    """Return the SHA-256 of the names and contents of the tokenizer's files and the chat template, and of those that
    say what stands before texts that become vectors, if anything does."""
    if is_gguf(path):
        return gguf_tokenizer_fingerprint(path)
    names = _TOKENIZER_FILES if (path / "tokenizer.json").is_file() else _ALL_FILES
    texts = _vector_texts(path)
    if texts is not None and not texts.is_plain:
        names = (*names, *PROMPT_FILES)
    return digest_of(path / name for name in names if (path / name).is_file())


def dummy_fingerprint(path: Path) -> bytes:
    """Return what identifies random weights: they follow from config.json."""
    return hashlib.sha256(b"dummy weights" + (path / "config.json").read_bytes()).digest()


def weights_fingerprint(path: Path, cache_dir: Path | None = None, *, every_file: bool = False) -> bytes:
    """Return the SHA-256 of config.json and all weight files, of all GGUF files, or of ``every_file`` of a directory.

    It is cached under ``cache_dir`` (default :func:`.cache_directory`) by the files' stamps, because reading a large
    model is slow.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if every_file else _weight_files(path)
    return cached_digest(files, (cache_dir or cache_directory()) / "weights")


def weights_stamps(path: Path) -> list[Stamp]:
    """Return the stamps of the files of :func:`weights_fingerprint`: while they stay, so do the weights."""
    return stamps_of(_weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    return list(gguf_parts(path)) if is_gguf(path) else [path / "config.json", *weight_paths(path)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"model {path.parent.name!r}: {path.name} is not JSON: {error}", "model") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"model {path.parent.name!r}: {path.name} does not hold a JSON object", "model")
    return value


def _sampling_defaults(path: Path, generation: dict[str, Any]) -> types_pb2.SamplingParams:
    defaults = {name: generation.get(name) for name in CHECKPOINT_NAMES}
    defaults["max_tokens"] = generation.get("max_new_tokens")
    try:
        params = narrow_sampling(defaults)
        validation.check_sampling(params, validation.ANY_MODEL)
    except InvalidArgument as error:  # reported now instead of in every request
        raise InvalidArgument(f"model {path.name!r}: generation_config.json: {error.message}", "model") from None
    return params


def _eos(file: Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise InvalidArgument(
            f"model {file.parent.name!r}: {file.name}: eos_token_id must be a token id or a list of them", "model"
        )
    return tuple(sorted(set(ids)))


def _eos_of_tokenizer(path: Path, tokens: dict[str, str]) -> tuple[int, ...]:
    if "eos_token" not in tokens:
        return ()
    try:
        token_id = load_tokenizer(path).token_to_id(tokens["eos_token"])
    except TokenloomError:
        return ()
    return () if token_id is None else (token_id,)


def _special_tokens(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    special = _read_json(path / "special_tokens_map.json") | tokenizer_config
    return {name: text for name in _SPECIAL_TOKENS if (text := _token_text(special.get(name)))}


def _add_tokens(tokenizer: "Tokenizer", path: Path) -> None:
    """Add the tokens of ``added_tokens_decoder`` or, as in transformers only without it, of ``added_tokens.json``.

    Raises ``InvalidArgument`` if a new token would get another id than the file says.
    """
    file, tokens = _added_tokens(path)
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    changed = {
        token_id: token
        for token_id, token in sorted(tokens.items())
        if token.content not in known or repr(known[token.content]) != repr(token)
    }
    is_new = {token.content: tokenizer.token_to_id(token.content) is None for token in changed.values()}
    tokenizer.add_tokens(list(changed.values()))
    for token_id, token in changed.items():
        found = tokenizer.token_to_id(token.content)
        # The library numbers new tokens itself. With another id than the file says, the embedding of another row would
        # be read.
        if is_new[token.content] and found != token_id:
            raise InvalidArgument(
                f"model {path.name!r}: {file}: token {token.content!r} must have id {found}, the next one after "
                f"those of tokenizer.json, not {token_id}",
                "model",
            )


def _added_tokens(path: Path) -> tuple[str, "dict[int, AddedToken]"]:
    """Return the name of the file that adds tokens, and the tokens by id."""
    from tokenizers import AddedToken

    config, file = _read_json(path / "tokenizer_config.json"), "tokenizer_config.json: added_tokens_decoder"
    try:
        if (entries := config.get("added_tokens_decoder")) is not None:
            return file, {
                int(token_id): AddedToken(**{name: value for name, value in entry.items() if name != "__type"})
                for token_id, entry in entries.items()
            }
        special = _special_tokens(path, config).values()
        file = "added_tokens.json"
        return file, {
            int(token_id): AddedToken(text, special=text in special, normalized=text not in special)
            for text, token_id in _read_json(path / file).items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"model {path.name!r}: {file} cannot be read: {error}", "model") from None


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


_IMAGES_OF_SMOLVLM = "{% elif line['type'] == 'image' %}{{ '<image>' }}"
_VIDEOS_OF_SMOLVLM = "{% elif line['type'] == 'video' %}{{ '<video>' }}"


def _chat_template(path: Path, tokenizer_config: dict[str, Any], model_type: object = None) -> str:
    template = _published_template(path, tokenizer_config)
    if model_type == "smolvlm" and "'video'" not in template:
        # The published template writes nothing for a video. transformers takes another one then, which differs in this.
        template = template.replace(_IMAGES_OF_SMOLVLM, _IMAGES_OF_SMOLVLM + _VIDEOS_OF_SMOLVLM)
    return template


def _published_template(path: Path, tokenizer_config: dict[str, Any]) -> str:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text()
    template = _read_json(path / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):  # a list of named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def cached_digest(files: Sequence[Path], cache: Path) -> bytes:
    """Return the digest of files, which is kept in the directory ``cache`` by their stamps."""
    stamps = stamps_of(files)
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    entry = cache / key
    try:
        cached = bytes.fromhex(entry.read_text())
        if len(cached) == hashlib.sha256().digest_size:
            return cached
    except (OSError, ValueError):
        pass  # missing or invalid: computed again
    digest = digest_of(files)
    if stamps_of(files) != stamps:
        return digest  # of files that changed while they were read: it is that of neither state
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        draft = entry.with_suffix(f".{digest.hex()[:8]}")
        draft.write_text(digest.hex())
        draft.replace(entry)
    except OSError:
        pass  # in a read-only home the digest is computed at each start
    return digest


def stamps_of(files: Iterable[Path]) -> list[Stamp]:
    """Return what changes with each change of a file: its path, size, times and inode. Tools that copy files keep the
    time of writing, and in some images it is the same for all files. Raises ``OSError``."""
    return [
        # With path, size and time of writing only, two sets of weights had one fingerprint: that which was computed
        # first and kept.
        (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for file in files
        if (stat := file.stat())
    ]


def digest_of(files: Iterable[Path]) -> bytes:
    """Return the SHA-256 of the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.digest()


def load_gguf_tokenizer(path: Path) -> "Tokenizer":
    """Return the tokenizer. Raises ``NotFound`` if the file is absent, ``InvalidArgument`` for one that is broken, or
    has no tokenizer or an unsupported one."""
    return _read(path, tokenizer.make_tokenizer)


def load_gguf_description(path: Path) -> tuple[tuple[int, ...], str, dict[str, str]]:
    """Return the ids that end an answer, the chat template (empty: none) and the special tokens by name.

    Raises the errors of :func:`load_gguf_tokenizer`.
    """
    return _read(
        path,
        lambda file: (tokenizer.eos_token_ids(file), tokenizer.chat_template(file), tokenizer.special_tokens(file)),
    )


def save_gguf_tokenizer(path: Path, cache_dir: Path | None = None) -> Path | None:
    """Return a ``tokenizer.json`` with the file's tokenizer, for parts that read only that format.

    See :func:`.tokenizer_json.save_tokenizer`. Raises the errors of :func:`load_gguf_tokenizer`.
    """
    return save_tokenizer(load_gguf_tokenizer(path), path, cache_dir)


def gguf_tokenizer_fingerprint(path: Path) -> bytes:
    """Return the SHA-256 of the file's entries about the tokenizer, the chat template included."""

    def digest(file: GgufFile) -> bytes:
        result = hashlib.sha256()
        with file.path.open("rb") as stream:
            for begin, end in tokenizer.tokenizer_entries(file):
                stream.seek(begin)
                result.update(stream.read(end - begin))
        return result.digest()

    return _read(path, digest)


def _read(path: Path, read: Callable[[GgufFile], T]) -> T:
    try:
        return read(read_gguf(path))
    except OSError as error:
        raise NotFound(f"model {path.name!r} cannot be read: {error.strerror}", field="model") from None
    except ValueError as error:
        raise InvalidArgument(f"model {path.name!r}: {error}", "model") from None
