"""Images, videos and sounds of requests: how clients send them, and the files that the gateway holds of them."""

import base64
import binascii
import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tokenloom.request.errors import Internal, InvalidArgument, Unavailable
from tokenloom.request.limits import Reservation
from tokenloom.v1 import types_pb2

_HEAD = re.compile(r"data:([^,;]*)(?:;[^,;=]+=[^,;]*)*;(base64|sha256),", re.IGNORECASE)
_URL = re.compile(r"https?://", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
RAW_DIGEST = "sha256:"
"""Before the digest of a file in place of its base64, where no data: URL is expected."""
OPTIONS_FIELD = "mm_processor_kwargs"
OPTIONS = frozenset({"min_pixels", "max_pixels", "max_soft_tokens", "num_frames", "fps"})
"""What clients may set of a model's processor, each a whole number but the last; the tokenizer knows which its model
has."""
_RATE = "fps"
MAX_NAME = 128
"""Limits the names that clients give to images, videos and sounds."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientFile:
    """A file as it is sent to an encoder."""

    pieces: Sequence[bytes]
    num_bytes: int
    digest: bytes
    """SHA-256 over its bytes."""

    @classmethod
    def of(cls, data: bytes) -> "ClientFile":
        """Return a file that is held in one piece."""
        return cls((data,), len(data), hashlib.sha256(data).digest())

    async def parts(self, size: int) -> AsyncIterator[bytes]:
        """Yield its bytes, at most ``size`` at a time."""
        for piece in self.pieces:
            for start in range(0, len(piece), size):
                yield piece[start : start + size]


@dataclass(frozen=True, slots=True, eq=False)
class StoredMedia:
    """A file that the tenant has uploaded. It is read from disk when an encoder needs it."""

    num_bytes: int
    digest: bytes
    """SHA-256 over its bytes."""
    read: Callable[[], Awaitable[bytes]]
    """Returns its bytes. Raises ``NotFound`` if it was deleted meanwhile, ``Unavailable`` if the disk fails."""


AnyFile: TypeAlias = ClientFile | StoredMedia
FindStored: TypeAlias = Callable[[str, str], StoredMedia]
"""Returns an uploaded file by its id. The second argument is the field that names it, for errors: ``NotFound``, and
``InvalidArgument`` for a file of another purpose."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, a video or a sound in a conversation. Its place is that of its part among all of the conversation."""

    field: str
    """The client's name of it, for errors."""
    file: AnyFile | None = None
    digest: bytes = b""
    """Of a file that the request, or an earlier one of the tenant, has sent; empty if ``file`` or ``url`` is set."""
    url: str = ""
    """Where the encoder fetches it."""
    name: str = ""
    """By which the tenant may name it in later requests; empty: it has none."""
    kind: types_pb2.MediaKind = types_pb2.MEDIA_KIND_IMAGE


class HeldFiles:
    """Holds the files of a request's body, and their bytes' reservation, for as long as anything uses them."""

    def __init__(self, files: Mapping[bytes, ClientFile], reserved: Reservation) -> None:
        """``files``: by digest."""
        self.files = files
        self._reserved = reserved
        self._num_holders = 1

    def hold(self) -> None:
        """Keep the files until one more :meth:`close`."""
        self._num_holders += 1

    def close(self) -> None:
        """Drop the files when their last holder has closed them."""
        self._num_holders -= 1
        if not self._num_holders:
            self.files = {}
            self._reserved.release()


_DETAILS = ("auto", "low", "high")
_FORMATS = ("wav", "mp3", "flac", "m4a", "mp4", "mpeg", "mpga", "ogg", "oga", "opus", "webm", "aac")
_SOUND_PARTS = ("input_audio", "audio_url")
MODALITIES: Mapping[types_pb2.MediaKind, str] = {
    types_pb2.MEDIA_KIND_IMAGE: "image",
    types_pb2.MEDIA_KIND_AUDIO: "audio",
    types_pb2.MEDIA_KIND_VIDEO: "video",
}
"""What vLLM's endpoints call each kind."""
_NOUNS: Mapping[types_pb2.MediaKind, str] = {
    types_pb2.MEDIA_KIND_IMAGE: "image",
    types_pb2.MEDIA_KIND_AUDIO: "sound",
    types_pb2.MEDIA_KIND_VIDEO: "video",
}
_TYPES: Mapping[types_pb2.MediaKind, tuple[str, ...]] = {
    types_pb2.MEDIA_KIND_IMAGE: ("image/",),
    types_pb2.MEDIA_KIND_AUDIO: ("audio/", "video/", "application/ogg"),  # browsers call a recording video/webm
    types_pb2.MEDIA_KIND_VIDEO: ("video/",),
}
"""How media types of files begin."""
_EXAMPLES: Mapping[types_pb2.MediaKind, str] = {
    types_pb2.MEDIA_KIND_IMAGE: "image/png",
    types_pb2.MEDIA_KIND_AUDIO: "audio/wav",
    types_pb2.MEDIA_KIND_VIDEO: "video/mp4",
}
_LISTED = "video/jpeg"
"""The type of a list of pictures, as vLLM's clients send a video: the base64 of each, with commas between them."""
_WITH_RATE = re.compile(r"data:video/jpeg;fps=", re.IGNORECASE)
MAX_LISTED = 1 << 14
"""Pictures of a list, as many as encoders take. Eight megabytes could list four million, of which each takes a
microsecond."""
_LONGEST_HEAD = 64


def noun_of(kind: types_pb2.MediaKind) -> str:
    """Return what messages call an image, a video or a sound."""
    return _NOUNS.get(kind, "file")


def data_url(file: AnyFile, kind: types_pb2.MediaKind = types_pb2.MEDIA_KIND_IMAGE) -> str:
    """Return what names a file by its digest. Encoders read its type from the file itself."""
    return f"data:{_EXAMPLES[kind]};sha256,{file.digest.hex()}"


def image_part(field: str, url: str) -> dict[str, str]:
    """Return the part of a chat that stands for an image of another API. ``field``: the client's name of the image."""
    return {"type": "input_image", "image_url": url, "field": field}


def sound_part(field: str, url: str) -> dict[str, str]:
    """Return the part of a chat that stands for a sound of another API. ``field``: the client's name of the sound."""
    return {"type": "audio_url", "audio_url": url, "field": field}


def video_part(field: str, url: str) -> dict[str, str]:
    """Return the part of a chat that stands for a video of another API. ``field``: the client's name of the video."""
    return {"type": "video_url", "video_url": url, "field": field}


def raw_url(field: str, data: object, kind: str = "image/png", noun: str = "an image") -> str:
    """Return the URL of a file that is base64 alone. Raises ``InvalidArgument`` naming the field."""
    if not isinstance(data, str) or not data:
        raise InvalidArgument(f"{field} must be the base64 of {noun}", field)
    if data.startswith(RAW_DIGEST):
        return f"data:{kind};sha256,{data.removeprefix(RAW_DIGEST)}"
    return f"data:{kind};base64,{data}"


def read_part(where: str, part: Mapping[str, object]) -> MediaPart:
    """Return the image, the video or the sound of a part. Raises as the functions that read these."""
    if (kind := part.get("type")) in _SOUND_PARTS:
        return read_sound(where, part)
    return read_video(where, part) if kind == "video_url" else read_image(where, part)


def read_video(where: str, part: Mapping[str, object]) -> MediaPart:
    """Return the video of a part: vLLM's ``video_url``, whose URL is in an object or not; or that of a
    :func:`video_part`. ``where``: the client's name of the part. Raises ``InvalidArgument`` naming its field."""
    name = _read_name(f"{where}.uuid", part.get("uuid"))
    field, value = str(part.get("field") or f"{where}.video_url")[:256], part.get("video_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    return _read_url(field, url, name, types_pb2.MEDIA_KIND_VIDEO)


def read_sound(where: str, part: Mapping[str, object]) -> MediaPart:
    """Return the sound of a part: OpenAI's ``input_audio``, which is base64 and the name of its format, or vLLM's
    ``audio_url``, whose URL is in an object or not; or that of a :func:`sound_part`.

    ``where``: the client's name of the part. Raises ``InvalidArgument`` naming its field.
    """
    name = _read_name(f"{where}.uuid", part.get("uuid"))
    if part.get("type") == "input_audio":
        field = f"{where}.input_audio"
        url: object = None
        if part.get("input_audio") is not None or not name:
            url = sound_url(where, part.get("input_audio"))
    else:
        field, value = str(part.get("field") or f"{where}.audio_url")[:256], part.get("audio_url")
        url = value.get("url") if isinstance(value, Mapping) else value
    return _read_url(field, url, name, types_pb2.MEDIA_KIND_AUDIO)


def sound_url(where: str, sound: object) -> str:
    """Return the URL of OpenAI's ``input_audio`` in the part ``where``. Raises ``InvalidArgument`` naming the field."""
    field = f"{where}.input_audio"
    if not isinstance(sound, Mapping):
        raise InvalidArgument(f'{field} must be {{"data": base64, "format": "wav"}}', field)
    coding = sound.get("format", "wav")
    if coding not in _FORMATS:  # which the encoder reads from the file itself
        raise InvalidArgument(f"{field}.format must be one of {', '.join(_FORMATS)}", f"{field}.format")
    return raw_url(f"{field}.data", sound.get("data"), f"audio/{coding}", "a sound")


def read_image(where: str, part: Mapping[str, object]) -> MediaPart:
    """Return the image of a part of OpenAI's: ``image_url``, whose URL is in an object or not, or ``input_image``; or
    that of an :func:`image_part`.

    ``where``: the client's name of the part. Raises ``InvalidArgument`` naming its field.
    """
    field = str(part.get("field") or f"{where}.image_url")[:256]
    value, detail = part.get("image_url"), part.get("detail")
    if isinstance(value, Mapping):
        detail = value.get("detail", detail)
        value = value.get("url")
    if detail is not None and detail not in _DETAILS:
        raise InvalidArgument(f"{field}.detail must be one of {', '.join(_DETAILS)}", f"{field}.detail")
    name = _read_name(f"{where}.uuid", part.get("uuid"))
    return _read_url(field, value, name, types_pb2.MEDIA_KIND_IMAGE)


def _read_name(where: str, name: object) -> str:
    if name is None:
        return ""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidArgument(f"{where}: uuid must be a text of 1 to {MAX_NAME} characters", where)
    return name


def _read_url(where: str, value: object, name: str, kind: types_pb2.MediaKind) -> MediaPart:
    noun = "an image" if kind == types_pb2.MEDIA_KIND_IMAGE else f"a {noun_of(kind)}"
    if value is None and name:
        return MediaPart(where, name=name, kind=kind)
    if not isinstance(value, str) or not value:
        form = f"data:{_TYPES[kind][0]}…;base64,…"
        raise InvalidArgument(f"{where} must be the URL of {noun}: {form} or https://…", where)
    if _URL.match(value):
        return MediaPart(where, url=value, name=name, kind=kind)
    head = _HEAD.match(value[:512])
    if head is None:
        raise InvalidArgument(f"{where} must be a data: URL with ;base64, or an http(s) URL", where)
    if not (found := head[1].lower()).startswith(_TYPES[kind]):
        raise InvalidArgument(f"{where} must be {noun}, and not of the type {found[:64]!r}", where)
    rest = value[head.end() :]
    if head[2].lower() == "sha256":
        return MediaPart(where, digest=read_digest(where, rest), name=name, kind=kind)
    if found == _LISTED and ("," in rest or _WITH_RATE.match(value)):
        return MediaPart(where, ClientFile.of(_listed(where, head[0], rest)), name=name, kind=kind)
    return MediaPart(where, ClientFile.of(_decode(where, rest, noun_of(kind))), name=name, kind=kind)


def read_digest(where: str, text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise InvalidArgument(f"{where} is not the SHA-256 of a file in hexadecimal digits", where)
    return digest


def _listed(where: str, head: str, text: str) -> bytes:
    """Return the file of a list of pictures, which encoders decode one by one: the list as it came."""
    if (count := text.count(",") + 1) > MAX_LISTED:
        raise InvalidArgument(f"{where} lists {count:,} pictures; at most {MAX_LISTED:,} are taken", where)
    for picture in text.split(","):
        if not picture or not _BASE64.fullmatch(picture):
            raise InvalidArgument(f"{where} must list the base64 of pictures, with commas between them", where)
    if len(head) > _LONGEST_HEAD:
        raise InvalidArgument(f"{where}: {_LISTED} may have ;fps= before ;base64, and nothing else", where)
    return f"{head}{text}".encode()


def _decode(where: str, text: str, noun: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{where} is not base64", where) from None
    if not data:
        raise InvalidArgument(f"{where} holds no {noun}", where)
    return data


def read_options(values: Mapping[str, object] | None, field: str = OPTIONS_FIELD) -> bytes:
    """Return the client's options of the processor as canonical JSON; empty: it sets none.

    ``field``: the client's name of them. Raises ``InvalidArgument`` for others than ``OPTIONS``.
    """
    if not values:
        return b""
    for name, value in values.items():
        where = f"{field}.{name[:64]}"
        if name not in OPTIONS:
            raise InvalidArgument(f"{where} is not supported; there are: {', '.join(sorted(OPTIONS))}", where)
        kinds, whole = ((int, float), "") if name == _RATE else ((int,), " whole")
        if type(value) not in kinds or not 0 < value < 2**31:  # type: ignore[operator]
            raise InvalidArgument(f"{where} must be a{whole} number above 0", where)
    return ("{" + ",".join(f'"{name}":{_number(values[name])}' for name in sorted(values)) + "}").encode()


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_URLS = {"input_image": "image_url", "audio_url": "audio_url", "video_url": "video_url"}
"""Where the parts that :func:`image_part`, :func:`sound_part` and :func:`video_part` return have their files."""
_KINDS_OF_URLS = {
    "image_url": types_pb2.MEDIA_KIND_IMAGE,
    "audio_url": types_pb2.MEDIA_KIND_AUDIO,
    "video_url": types_pb2.MEDIA_KIND_VIDEO,
}


def name_by_digest(turns: Iterable[Mapping[str, object]], find: FindStored | None = None) -> dict[bytes, AnyFile]:
    """Replace the files in the parts of turns, which are to be kept, by their digests; return the files.

    ``find``: None: the gateway stores no files. Raises as it does, and ``InvalidArgument`` naming the part's field.
    """
    files: dict[bytes, AnyFile] = {}
    for turn in turns:
        content = turn.get("content")
        for part in content if isinstance(content, list) else ():
            if (member := _URLS.get(part["type"])) is None:
                continue
            kind = _KINDS_OF_URLS[member]
            if "file_id" in part:
                file: AnyFile | None = _stored(part.pop("file_id"), part["field"], find)
            else:
                file = read_part("", part).file
            if file is not None:
                files[file.digest] = file
                part[member] = data_url(file, kind)
    return files


def _stored(file_id: object, field: str, find: FindStored | None) -> StoredMedia:
    if not isinstance(file_id, str):
        raise InvalidArgument(f"{field} must be the id of a file", field)
    if find is None:
        raise InvalidArgument(f"{field}: this gateway keeps no files (--batch-dir); send image_url", field)
    return find(file_id, field)


def with_files(parts: Iterable[MediaPart], files: Mapping[bytes, AnyFile]) -> list[MediaPart]:
    """Return parts with their files, as far as these are there."""
    return [replace(part, file=files[part.digest], digest=b"") if part.digest in files else part for part in parts]


class KeptFiles:
    """Keeps the files of requests whose conversations are stored, so that later ones find them again.

    The tenant with the most bytes loses its oldest file first, so that no tenant drops those of the others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shelves: dict[str, OrderedDict[bytes, AnyFile]] = {}  # by tenant; the oldest first
        self._sizes = Counter[str]()

    def get(self, tenant: str, digest: bytes) -> AnyFile | None:
        """Return a tenant's file, which is the youngest then; None: it is not kept."""
        shelf = self._shelves.get(tenant)
        if shelf is None or digest not in shelf:
            return None
        shelf.move_to_end(digest)
        return shelf[digest]

    def put(self, tenant: str, file: AnyFile) -> None:
        """Keep a file; drop the oldest ones that do not fit with it."""
        if file.num_bytes > self._max_bytes or self.get(tenant, file.digest) is not None:
            return
        self._shelves.setdefault(tenant, OrderedDict())[file.digest] = file
        self._sizes[tenant] += file.num_bytes
        while self._sizes.total() > self._max_bytes:
            largest, _ = self._sizes.most_common(1)[0]
            _, dropped = self._shelves[largest].popitem(last=False)
            self._sizes[largest] -= dropped.num_bytes
            if not self._shelves[largest]:
                del self._shelves[largest], self._sizes[largest]


def check_parts(parts: Sequence[MediaPart], limits: types_pb2.ModelLimits | None, model: str, *, is_able: bool) -> None:
    """Refuse images, videos and sounds that cannot be read, before anything is spent on them. ``is_able``: the
    tokenizer knows how the model writes some.

    Raises ``InvalidArgument``, and ``Unavailable`` before the first engine serves.
    """
    kinds = limits.media_kinds if limits is not None and is_able else ()
    for part in parts if limits is not None or not is_able else ():
        if part.kind not in kinds:
            readable = " and ".join(["text", *(f"{noun_of(kind)}s" for kind in kinds)])
            raise InvalidArgument(f"{part.field}: the model {model!r} reads {readable} only", part.field)
    if limits is None:
        raise Unavailable("no engine is serving yet; retry")
    for kind, most in (
        (types_pb2.MEDIA_KIND_IMAGE, limits.max_images_per_prompt),
        (types_pb2.MEDIA_KIND_AUDIO, limits.max_sounds_per_prompt),
        (types_pb2.MEDIA_KIND_VIDEO, limits.max_videos_per_prompt),
    ):
        own = [part for part in parts if part.kind == kind]
        if most and len(own) > most:
            field = own[0].field
            raise InvalidArgument(f"{field}: a prompt may have {most} {noun_of(kind)}s, not {len(own)}", field)


def place_of(item: types_pb2.MediaItem) -> tuple[int, int]:
    """Return the first token of an item, and how many there are up to its last one, those between its rows included."""
    first, last = item.runs[0], item.runs[-1]
    return first.position, last.position + last.num_tokens - first.position


def check_items(
    items: Sequence[types_pb2.MediaItem],
    parts: Sequence[MediaPart],
    limits: types_pb2.ModelLimits,
    places: Sequence[tuple[int, int]] = (),
) -> None:
    """Refuse images and sounds with more rows than an engine computes, or that stand elsewhere than at the client's
    ``places``. Raises ``InvalidArgument``; ``Internal`` if the tokenizer has not placed all of them."""
    if len(items) != len(parts):
        raise Internal("the tokenizer has not placed all images and sounds")
    for item, part in zip(items, parts, strict=True):
        if limits.max_media_rows and item.num_rows > limits.max_media_rows:
            message = f"it makes {item.num_rows} tokens; at most {limits.max_media_rows} are served"
            raise InvalidArgument(f"{part.field}: {message}", part.field)
    for item, part, place in zip(items, parts, places, strict=bool(places)):
        if place != (found := place_of(item)):
            message = f"it is at {place[0]}, of {place[1]} tokens, but the prompt has it at {found[0]}, of {found[1]}"
            raise InvalidArgument(f"{part.field}: {message}", part.field)


def check_used(files: Iterable[bytes], parts: Iterable[MediaPart]) -> None:
    """Raise ``InvalidArgument`` for a file of the body that no part shows. ``files``: their digests."""
    if not set(files) <= {part.digest for part in parts}:
        raise InvalidArgument("the body holds base64 of a file at a place where no image, video or sound is read")
