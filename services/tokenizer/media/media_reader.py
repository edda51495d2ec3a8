"""Reads from a checkpoint's files how its model writes images or sounds, and places them in rendered conversations."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import digest_of
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE, MediaItem, MediaKind, MediaRun

from .families import Gemma4, Idefics, InternVL, OneVision, Pixtral, Qwen, Qwen2Audio, gemma3, llava
from .media_text import OPTIONS_FIELD, Entries, MediaFamily, MediaText, ShownMedia

_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
"""What the rows of an image or a sound depend on, beside the weights."""
_NAMES = {MEDIA_KIND_IMAGE: "image", MEDIA_KIND_AUDIO: "sound"}


@dataclass(frozen=True)
class _Checkpoint:
    """Gives the entries of a checkpoint's files, and its tokens."""

    config: Entries
    images: Entries
    """Of the processor of images, or of sounds."""
    processor: Entries
    tokenizer: Tokenizer

    def token(self, kind: str, default: str) -> str:
        """Return the token that ``config.json`` names by its id, as ``image_token_id`` or ``image_token_index``."""
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if name in self.config and (found := self.tokenizer.id_to_token(self.config.count(name))) is not None:
                return found
        return default


def _llava(files: _Checkpoint) -> MediaFamily:
    vision = files.config.part("vision_config").text("model_type")
    if vision == "pixtral":
        return _pixtral(files)
    return llava(files.token("image", "<image>"), files.config, files.images, files.processor)


def _pixtral(files: _Checkpoint) -> MediaFamily:
    return Pixtral.read(files.token("image", "[IMG]"), files.config, files.images, files.processor)


def _qwen(files: _Checkpoint) -> MediaFamily:
    return Qwen.read(files.token("image", "<|image_pad|>"), files.images)


def _gemma3(files: _Checkpoint) -> MediaFamily:
    if files.images.flag("do_pan_and_scan", default=False):
        raise InvalidArgument("model: do_pan_and_scan of preprocessor_config.json is not supported", "model")
    begin, end = files.token("boi", "<start_of_image>"), files.token("eoi", "<end_of_image>")
    return gemma3(files.token("image", "<image_soft_token>"), begin, end, files.config, files.processor)


def _gemma4(files: _Checkpoint) -> MediaFamily:
    begin, end = files.token("boi", "<|image>"), files.token("eoi", "<image|>")
    return Gemma4.read(files.token("image", "<|image|>"), begin, end, files.images)


def _internvl(files: _Checkpoint) -> MediaFamily:
    token = files.token("image", "<IMG_CONTEXT>")
    return InternVL.read(token, "<img>", "</img>", files.config, files.images, files.processor)


def _idefics(files: _Checkpoint) -> MediaFamily:
    return Idefics.read(files.token("image", "<image>"), files.images, files.processor)


def _onevision(files: _Checkpoint) -> MediaFamily:
    return OneVision.read(files.token("image", "<image>"), files.config, files.images, files.processor)


def _qwen2_audio(files: _Checkpoint) -> MediaFamily:
    return Qwen2Audio.read(files.token("audio", "<|AUDIO|>"), files.images)


_FAMILIES: Mapping[str, Callable[[_Checkpoint], MediaFamily]] = {
    "llava": _llava,
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "internvl": _internvl,
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
    "qwen2_audio": _qwen2_audio,
}
"""By the ``model_type`` of ``config.json``."""


@dataclass(frozen=True)
class MediaReader:
    """Expands the images or sounds of conversations, and describes their rows."""

    family: MediaFamily
    token_id: int
    """The id of the family's token."""
    fingerprint: bytes
    """SHA-256 over the files on which the rows depend."""
    levels: int = 1
    """Rows side by side: the model adds those behind the first ones after its first layers."""
    is_whole: bool = False
    """Whether the tokens of an image see each other."""
    vocab_size: int = 2**32
    """Of the model, whose embeddings may end before the token's id."""

    @classmethod
    def of_checkpoint(cls, path: Path, tokenizer: Tokenizer) -> "MediaReader | None":
        """Return the reader of a checkpoint's model; None: it reads text only, or in a way that is not known here.

        Raises ``InvalidArgument`` for files with entries that are wrong.
        """
        config = read_entries(path / "config.json")
        make = _FAMILIES.get(config.get("model_type", ""))
        processor = read_entries(path / "processor_config.json")
        within = processor.get("image_processor") or processor.get("feature_extractor")
        images = within or read_entries(path / "preprocessor_config.json")
        if make is None or not images:
            return None
        entries = Entries(config, "config.json")
        files = _Checkpoint(
            entries,
            Entries(images, "preprocessor_config.json"),
            Entries(processor, "processor_config.json"),
            tokenizer,
        )
        family = make(files)
        token_id = tokenizer.token_to_id(family.token)
        if token_id is None:
            raise InvalidArgument(f"model: the tokenizer has no token {family.token!r}", "model")
        bidirectional = entries.part("text_config").text("use_bidirectional_attention")
        return cls(
            family,
            token_id,
            digest_of(path / name for name in _FILES if (path / name).is_file()),
            levels=1 + len(entries.part("vision_config").items("deepstack_visual_indexes")),
            is_whole=config["model_type"] == "gemma3" or bidirectional == "vision",
            vocab_size=entries.part("text_config").number("vocab_size", entries.number("vocab_size", 2**32)),
        )

    def expand(self, rendered: str, media: Sequence[MediaSize], salt: bytes = b"") -> tuple[str, list[MediaItem]]:
        """Return the text of a rendered conversation with the tokens of its media, and its items without their runs.

        ``salt``: the tenant's, part of the items' keys. Raises ``InvalidArgument`` for an image or a sound that the
        model does not take, and for a template that does not write one mark for each.
        """
        # The text, and never its ids: tokens of the text between tiles merge with the text around the image.
        pieces, mark = rendered.split(self.family.mark), self.family.mark
        if len(pieces) - 1 != len(media):
            raise InvalidArgument(
                f"the chat template of this model has written {len(pieces) - 1} marks {mark} for {len(media)} "
                f"{self._name}s: it has no place for them in these turns",
                "messages",
            )
        written, items = [pieces[0]], []
        for index, (image, piece) in enumerate(zip(media, pieces[1:], strict=True)):
            text = self._text(index, image, len(media))
            items.append(self._item(image, text, index, len(media), salt))
            written += text.text, piece
        return "".join(written), items

    def items(self, media: Sequence[MediaSize], salt: bytes = b"") -> list[MediaItem]:
        """Return what :meth:`expand` does for media of a conversation whose tokens are known. Raises as it does."""
        count = len(media)
        return [
            self._item(image, self._text(index, image, count), index, count, salt) for index, image in enumerate(media)
        ]

    def _text(self, index: int, image: MediaSize, count: int) -> MediaText:
        """Return the tokens of one of ``count`` images or sounds, as text."""
        size = self._size(index, image)
        try:
            text = self.family.text(size, count)
        except ValueError as error:
            raise self._refused(index, str(error)) from None
        if not text.text.count(self.family.token):
            length = f"{image.samples} samples" if image.samples else f"{image.width} x {image.height}"
            raise self._refused(index, f"its size of {length} leaves no rows")
        return text

    def place(self, items: Sequence[MediaItem], token_ids: list[int]) -> None:
        """Give items the runs of their tokens in a prompt; ids that the model has not become 0 there. Raises
        ``InvalidArgument`` if there are others."""
        token_id = self.token_id
        places = [position for position, each in enumerate(token_ids) if each == token_id]
        if len(places) != sum(item.num_rows for item in items):
            raise InvalidArgument(
                f"messages: there are {len(places)} tokens {self.family.token} for "
                f"{sum(item.num_rows for item in items)} rows of the {self._name}s; each row takes one",
                "messages",
            )
        taken = 0
        for item in items:
            item.runs.extend(_runs(places[taken : taken + item.num_rows]))
            taken += item.num_rows
        if token_id >= self.vocab_size:  # their rows take the place of the embeddings in any case
            for position in places:
                token_ids[position] = 0

    @property
    def _name(self) -> str:
        return _NAMES[self.family.kind]

    def _refused(self, index: int, reason: str) -> InvalidArgument:
        where = f"{self._name} {index + 1} of the conversation"
        return InvalidArgument(f"{where} cannot be read by this model: {reason}", f"media[{index}]")

    def check_kind(self, index: int, kind: MediaKind) -> None:
        """Raise ``InvalidArgument`` if the model does not read what has this place among a prompt's media."""
        if kind != self.family.kind:
            other = _NAMES.get(kind, "medium")
            raise InvalidArgument(f"this model reads text and {self._name}s, and no {other}s", f"media[{index}]")

    def _size(self, index: int, image: MediaSize) -> ShownMedia:
        self.check_kind(index, image.kind)
        if not (image.samples if image.kind == MEDIA_KIND_AUDIO else image.width and image.height):
            raise self._refused(index, "it is empty")
        options: Mapping[str, Any] = json.loads(image.options_json) if image.options_json else {}
        for name, value in options.items():
            if name not in self.family.option_names or type(value) is not int:
                known = ", ".join(sorted(self.family.option_names)) or "none"
                raise InvalidArgument(
                    f"{OPTIONS_FIELD}.{name[:64]} is not an option of this model's {self._name}s; there are: {known}",
                    f"{OPTIONS_FIELD}.{name[:64]}",
                )
        return ShownMedia(image.width, image.height, options, image.samples)

    def _item(self, image: MediaSize, text: MediaText, index: int, count: int, salt: bytes) -> MediaItem:
        num_rows = text.text.count(self.family.token)
        # The rows of an image alone and beside another one may be of the same number, but are not the same rows.
        place = min(count, 2) if self.family.depends_on_count else 0
        parts = (salt, image.digest, self.fingerprint, image.options_json, struct.pack("<QQ", num_rows, place))
        frames, lines, columns = text.grid
        return MediaItem(
            key=digest_of_parts(parts),
            kind=image.kind,
            num_rows=num_rows,
            levels=self.levels,
            grid_t=frames,
            grid_h=lines,
            grid_w=columns,
            is_whole=self.is_whole,
            encoder=image.encoder,
            digest=image.digest,
            options_json=image.options_json,
            index=index,
            num_in_prompt=count,
        )


def _runs(places: Sequence[int]) -> Iterator[MediaRun]:
    """Yield the runs of consecutive places of one item's rows."""
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield MediaRun(position=places[start], num_tokens=index - start, row_offset=start)
            start = index


def digest_of_parts(parts: Sequence[bytes]) -> bytes:
    """Return SHA-256 over parts, each with its length: otherwise two of them could share a border."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def read_entries(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; without one, no entries. Raises ``InvalidArgument`` for other contents."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"model: {path.name} is not JSON: {error}", "model") from None
    return value if isinstance(value, dict) else {}
