"""Reads from a checkpoint's files how its model writes images, videos or sounds, and places them in rendered
conversations."""

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import IMAGE_FILES, VIDEO_FILE, digest_of
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import (
    MEDIA_KIND_AUDIO,
    MEDIA_KIND_IMAGE,
    MEDIA_KIND_VIDEO,
    MediaItem,
    MediaKind,
    MediaRun,
)

from .families import Gemma4, Idefics, InternVL, OneVision, Pixtral, Qwen, Qwen2Audio, gemma3, llava
from .media_text import OPTIONS_FIELD, Entries, MediaFamily, MediaText, ShownMedia
from .video_families import (
    Gemma4Video,
    InternVLVideo,
    OneVisionVideo,
    Qwen2Video,
    Qwen3Video,
    SmolVideo,
    few_frames,
)

_FILES = ("config.json", *IMAGE_FILES, VIDEO_FILE)
"""What the rows of an image, a video or a sound depend on, beside the weights."""
_NAMES = {MEDIA_KIND_IMAGE: "image", MEDIA_KIND_AUDIO: "sound", MEDIA_KIND_VIDEO: "video"}
_NUMBERS = {"fps": (int, float)}
"""The types of options that are no whole numbers."""


@dataclass(frozen=True)
class _Checkpoint:
    """Gives the entries of a checkpoint's files, and its tokens."""

    config: Entries
    images: Entries
    """Of the processor of images, or of sounds."""
    processor: Entries
    tokenizer: Tokenizer
    videos: Entries
    """Of the processor of videos."""

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


def _qwen2_video(files: _Checkpoint) -> MediaFamily:
    return Qwen2Video.read(files.token("video", "<|video_pad|>"), files.config, files.videos)


def _qwen3_video(files: _Checkpoint) -> MediaFamily:
    begin, end = files.token("vision_start", "<|vision_start|>"), files.token("vision_end", "<|vision_end|>")
    return Qwen3Video.read(files.token("video", "<|video_pad|>"), begin, end, files.videos)


def _onevision_video(files: _Checkpoint) -> MediaFamily:
    return OneVisionVideo.read(files.token("video", "<video>"), files.config, files.videos, files.processor)


def _internvl_video(files: _Checkpoint) -> MediaFamily:
    token, rows = files.token("image", "<IMG_CONTEXT>"), files.config.number("image_seq_length", 256)
    rows = files.processor.number("image_seq_length", rows)
    return InternVLVideo.read(token, "<img>", "</img>", rows, files.videos)


def _smol_video(files: _Checkpoint) -> MediaFamily:
    return SmolVideo.read(files.token("image", "<image>"), files.videos, files.processor)


def _gemma4_video(files: _Checkpoint) -> MediaFamily:
    begin, end = files.token("boi", "<|image>"), files.token("eoi", "<image|>")
    frame = Gemma4.read(files.token("video", "<|video|>"), begin, end, files.videos, most=70)
    return Gemma4Video(frame, few_frames(files.videos))


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
_VIDEOS: Mapping[str, Callable[[_Checkpoint], MediaFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _qwen2_video),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3_video),
    "llava_onevision": _onevision_video,
    "internvl": _internvl_video,
    "smolvlm": _smol_video,
    "gemma4": _gemma4_video,
}
"""Of those that are shown videos, too."""


@dataclass(frozen=True)
class MediaReader:
    """Expands the images, videos or sounds of conversations, and describes their rows."""

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
    videos: MediaFamily | None = None
    """How the model is shown videos; None: it is shown none."""
    video_id: int | None = None
    """The id of their token."""

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
            _video_entries(path, processor, images),
        )
        family = make(files)
        make_videos = _VIDEOS.get(config["model_type"])
        videos = None if make_videos is None else make_videos(files)
        video_id = None if videos is None else tokenizer.token_to_id(videos.token)
        if video_id is None:  # what was left out of a vocabulary is not shown
            videos = None
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
            videos=videos,
            video_id=video_id,
        )

    @property
    def marks(self) -> list[str]:
        """What the chat template writes for an image, a video or a sound."""
        return [family.mark for family in self._families]

    @property
    def kinds(self) -> list[MediaKind]:
        """What the model reads beside text."""
        return [self.family.kind] if self.videos is None else [self.family.kind, self.videos.kind]

    def expand(self, rendered: str, media: Sequence[MediaSize], salt: bytes = b"") -> tuple[str, list[MediaItem]]:
        """Return the text of a rendered conversation with the tokens of its media, and its items without their runs.

        ``salt``: the tenant's, part of the items' keys. Raises ``InvalidArgument`` for what the model does not take,
        and for a template that does not write one mark for each, in their order.
        """
        # The text, and never its ids: tokens of the text between tiles merge with the text around the image.
        marks = self.marks
        pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", rendered)
        written = pieces[1::2]
        expected = [self._family(index, each.kind).mark for index, each in enumerate(media)]
        if written != expected:
            names = " and ".join(f"{_NAMES[family.kind]}s" for family in self._families)
            raise InvalidArgument(
                f"the chat template of this model has written {len(written)} marks {' or '.join(marks)} for "
                f"{len(media)} {names}{' in another order' if len(written) == len(media) else ''}: it has no place for "
                "them in these turns",
                "messages",
            )
        texts = self._texts(media)
        for index, text in enumerate(texts):
            pieces[2 * index + 1] = text.text
        return "".join(pieces), self._items(media, texts, salt)

    def order(self, rendered: str, kinds: Sequence[MediaKind]) -> list[int]:
        """Return the places of media of these kinds in the order in which a text has marks for them. It is theirs where
        the text has others: :meth:`expand` says so."""
        places = {
            family.mark: [at for at, kind in enumerate(kinds) if kind == family.kind] for family in self._families
        }
        written = re.findall("|".join(map(re.escape, places)), rendered)
        if Counter(written) != Counter({mark: len(own) for mark, own in places.items() if own}):
            return list(range(len(kinds)))
        taken = {mark: iter(own) for mark, own in places.items()}
        return [next(taken[mark]) for mark in written]

    def items(self, media: Sequence[MediaSize], salt: bytes = b"") -> list[MediaItem]:
        """Return what :meth:`expand` does for media of a conversation whose tokens are known. Raises as it does."""
        return self._items(media, self._texts(media), salt)

    @property
    def _families(self) -> list[MediaFamily]:
        return [self.family] if self.videos is None else [self.family, self.videos]

    def _family(self, index: int, kind: MediaKind) -> MediaFamily:
        """Return the family of a kind. Raises as :meth:`check_kind`."""
        self.check_kind(index, kind)
        return self.family if kind == self.family.kind or self.videos is None else self.videos

    def _texts(self, media: Sequence[MediaSize]) -> list[MediaText]:
        """Return what stands for each of a prompt's media."""
        families = [self._family(index, each.kind) for index, each in enumerate(media)]
        known = {name for family in families for name in family.option_names}
        counts = Counter(each.kind for each in media)
        return [
            self._text(index, each, family, known, counts[each.kind])
            for index, (each, family) in enumerate(zip(media, families, strict=True))
        ]

    def _text(self, index: int, image: MediaSize, family: MediaFamily, known: Collection[str], count: int) -> MediaText:
        """Return the tokens of one of ``count`` images, videos or sounds, as text. ``known``: the options of all of the
        prompt's media, of which each takes its own."""
        size = self._size(index, image, family, known)
        try:
            text = family.text(size, count)
        except ValueError as error:
            raise self._refused(index, family, str(error)) from None
        if not text.text.count(family.token):
            length = f"{image.samples} samples" if image.samples else f"{image.width} x {image.height}"
            raise self._refused(index, family, f"its size of {length} leaves no rows")
        return text

    def place(self, items: Sequence[MediaItem], token_ids: list[int]) -> None:
        """Give items the runs of their tokens in a prompt; ids that the model has not become 0 there. Raises
        ``InvalidArgument`` if there are others."""
        ids = {self.family.kind: self.token_id}
        if self.videos is not None and self.video_id is not None:
            ids[self.videos.kind] = self.video_id
        for token_id in set(ids.values()):  # frames of some videos have the token of images
            kinds = [kind for kind, own in ids.items() if own == token_id]
            self._place(token_id, kinds, [item for item in items if item.kind in kinds], token_ids)

    def _place(
        self, token_id: int, kinds: Sequence[MediaKind], items: Sequence[MediaItem], token_ids: list[int]
    ) -> None:
        """Give items of these kinds the runs of their token."""
        places = [position for position, each in enumerate(token_ids) if each == token_id]
        if len(places) != (num_rows := sum(item.num_rows for item in items)):
            token = self._family(0, kinds[0]).token
            names = " and ".join(f"{_NAMES[kind]}s" for kind in kinds)
            raise InvalidArgument(
                f"messages: there are {len(places)} tokens {token} for {num_rows} rows of the {names}; each row takes "
                "one",
                "messages",
            )
        taken = 0
        for item in items:
            item.runs.extend(_runs(places[taken : taken + item.num_rows]))
            taken += item.num_rows
        if token_id >= self.vocab_size:  # their rows take the place of the embeddings in any case
            for position in places:
                token_ids[position] = 0

    def _refused(self, index: int, family: MediaFamily, reason: str) -> InvalidArgument:
        where = f"{_NAMES[family.kind]} {index + 1} of the conversation"
        return InvalidArgument(f"{where} cannot be read by this model: {reason}", f"media[{index}]")

    def check_kind(self, index: int, kind: MediaKind) -> None:
        """Raise ``InvalidArgument`` if the model does not read what has this place among a prompt's media."""
        if kind not in self.kinds:
            other, readable = _NAMES.get(kind, "medium"), [f"{_NAMES[each]}s" for each in self.kinds]
            raise InvalidArgument(
                f"this model reads text and {' and '.join(readable)}, and no {other}s", f"media[{index}]"
            )

    def _size(self, index: int, image: MediaSize, family: MediaFamily, known: Collection[str]) -> ShownMedia:
        is_there = {
            MEDIA_KIND_AUDIO: bool(image.samples),
            MEDIA_KIND_VIDEO: bool(image.frames and image.width and image.height),
        }.get(image.kind, bool(image.width and image.height))
        if not is_there:
            raise self._refused(index, family, "it is empty")
        options: Mapping[str, Any] = json.loads(image.options_json) if image.options_json else {}
        for name, value in options.items():
            if name not in known or type(value) not in _NUMBERS.get(name, (int,)):
                names = ", ".join(sorted(known)) or "none"
                raise InvalidArgument(
                    f"{OPTIONS_FIELD}.{name[:64]} is not an option of this model's {_NAMES[family.kind]}s; there are: "
                    f"{names}",
                    f"{OPTIONS_FIELD}.{name[:64]}",
                )
        own = _own_options(image, family)
        return ShownMedia(image.width, image.height, own, image.samples, image.frames, image.frame_rate)

    def _items(self, media: Sequence[MediaSize], texts: Sequence[MediaText], salt: bytes) -> list[MediaItem]:
        counts = Counter(each.kind for each in media)
        return [
            self._item(each, text, index, counts[each.kind], salt)
            for index, (each, text) in enumerate(zip(media, texts, strict=True))
        ]

    def _item(self, image: MediaSize, text: MediaText, index: int, count: int, salt: bytes) -> MediaItem:
        family = self._family(index, image.kind)
        num_rows, options = text.text.count(family.token), text.options_json
        if not options and (own := _own_options(image, family)):
            options = json.dumps(own, sort_keys=True, separators=(",", ":")).encode()
        # The rows of an image alone and beside another one may be of the same number, but are not the same rows.
        place = min(count, 2) if family.depends_on_count else 0
        parts = [salt, image.digest, self.fingerprint, options, struct.pack("<QQ", num_rows, place)]
        if text.frame_step:
            parts.append(struct.pack("<d", text.frame_step))
        frames, lines, columns = text.grid
        return MediaItem(
            key=digest_of_parts(parts),
            kind=image.kind,
            num_rows=num_rows,
            levels=self.levels,
            grid_t=frames,
            grid_h=lines,
            grid_w=columns,
            frame_step=text.frame_step,
            is_whole=self.is_whole,
            encoder=image.encoder,
            digest=image.digest,
            options_json=options,
            index=index,
            num_in_prompt=count,
        )


def _own_options(image: MediaSize, family: MediaFamily) -> dict[str, Any]:
    """Return those of a prompt's options that its family takes."""
    options: Mapping[str, Any] = json.loads(image.options_json) if image.options_json else {}
    return {name: value for name, value in options.items() if name in family.option_names}


def _video_entries(path: Path, processor: Mapping[str, Any], images: Mapping[str, Any]) -> Entries:
    """Return the entries of the processor of videos, which are those of images where a checkpoint has no others."""
    if processor.get("video_processor"):
        return Entries(processor["video_processor"], "processor_config.json: video_processor")
    if found := read_entries(path / VIDEO_FILE):
        return Entries(found, VIDEO_FILE)
    own = read_entries(path / "preprocessor_config.json")
    return Entries(own or images, "preprocessor_config.json")


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
