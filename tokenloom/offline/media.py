"""Images, videos and sounds in prompts of the offline API: reads what callers give, and computes rows in this process,
as an encoder does for a mesh."""

import base64
import binascii
import io
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from tokenloom.engine_core.data.config import WorkerConfig
from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.request.errors import TokenloomError
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.services.tokenizer.media.transcript_prompts import TranscriptPrompts
from tokenloom.services.tokenizer.spelled_tokens import Rendered
from tokenloom.v1.tokenizer_pb2 import EncodeTranscriptRequest, MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO, MediaItem, MediaKind

if TYPE_CHECKING:  # transformers, which few callers need
    from tokenloom.gpu_worker.towers.processor import Pixels, Processor
    from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor
    from tokenloom.gpu_worker.towers.sound_tower import SoundTower
    from tokenloom.gpu_worker.towers.tower import Tower

Samples: TypeAlias = npt.NDArray[np.float32]
_KEPT_BYTES: Final = 256 << 20
"""Rows that stay after they were computed, for prompts whose KV was lost."""
_DATA_URL: Final = "data:"
_LISTED: Final = "data:video/jpeg"
"""Begins a list of pictures, the frames of a video."""
_IMAGE_KEYS: Final = {"image_url": "image_url", "image": "image", "image_pil": "image_pil", "input_image": "image_url"}
_SOUND_KEYS: Final = {"audio_url": "audio_url", "audio": "audio", "input_audio": "input_audio"}
"""The types of parts that hold an image or a sound, with the key of what it is; below, those of a video."""
_VIDEO_KEYS: Final = {"video_url": "video_url", "video": "video"}
_KEYS: Final = {**_IMAGE_KEYS, **_SOUND_KEYS, **_VIDEO_KEYS}
MARKS: Final = {
    MEDIA_KIND_IMAGE: {"type": "image"},
    MEDIA_KIND_AUDIO: {"type": "audio", "audio": ""},
    MEDIA_KIND_VIDEO: {"type": "video"},
}
"""What chat templates read in place of a part. The published one of Qwen2-Audio looks for the key alone."""


@dataclass(frozen=True)
class GivenMedia:
    """Holds an image, a video or a sound of a caller.

    Attributes:
        file: Empty if ``samples`` are set.
        samples: Of a sound, [n] or [channels, n].
        rate: Samples a second; 0: as many as the model reads.
    """

    kind: MediaKind
    file: bytes = b""
    samples: Samples | None = None
    rate: int = 0


@dataclass(frozen=True)
class PromptMedia:
    """Holds the images and sounds of one prompt until it has ended."""

    items: Sequence[MediaItem] = ()
    """With the places of their rows; none before the prompt's tokens are known."""
    files: Mapping[bytes, bytes | Samples] = field(default_factory=dict)
    """By digest: files of images and videos, and samples of sounds at the rate that the model reads."""

    @cached_property
    def by_rows(self) -> dict[RowsKey, MediaItem]:
        """The items by the names of their rows in the core."""
        return {RowsKey(item.key, item.num_rows, item.levels): item for item in self.items}


def read_image(image: object) -> GivenMedia:
    """Return an image: a picture of PIL, the path of a file, a data: URL, or the bytes of a file. Raises
    ``ValueError`` for anything else."""
    if (file := _file_of("an image", image)) is not None:
        return GivenMedia(MEDIA_KIND_IMAGE, file)
    if hasattr(image, "save") and hasattr(image, "mode"):
        written = io.BytesIO()
        image.save(written, "PNG")  # which loses nothing
        return GivenMedia(MEDIA_KIND_IMAGE, written.getvalue())
    raise ValueError(f"an image must be a picture of PIL, a path, a data: URL or bytes, not {type(image).__name__}")


def read_sound(sound: Any) -> GivenMedia:
    """Return a sound: samples, alone or in a pair with their rate, the path of a file, a data: URL, or the bytes of a
    file. Raises ``ValueError`` for anything else."""
    if isinstance(sound, Mapping) and "data" in sound:  # as OpenAI's input_audio has it
        return GivenMedia(MEDIA_KIND_AUDIO, _of_base64("the data of a sound", sound["data"]))
    if (file := _file_of("a sound", sound)) is not None:
        return GivenMedia(MEDIA_KIND_AUDIO, file)
    if not _is_pair(sound):
        return GivenMedia(MEDIA_KIND_AUDIO, samples=_samples(sound))
    samples, rate = sound
    if rate != int(rate) or rate <= 0:
        raise ValueError(f"the rate of a sound must be a whole number of samples a second, not {rate}")
    return GivenMedia(MEDIA_KIND_AUDIO, samples=_samples(samples), rate=int(rate))


def read_video(video: Any) -> GivenMedia:
    """Return a video: the path of a file, a data: URL, the bytes of a file, or its frames: an array [frames, height,
    width, 3] or a list of pictures or arrays, alone or in a pair with a mapping that has their ``fps``. Raises
    ``ValueError`` for anything else."""
    if isinstance(video, str) and video.startswith(_LISTED):
        return GivenMedia(MEDIA_KIND_VIDEO, video.encode())
    if (file := _file_of("a video", video)) is not None:
        return GivenMedia(MEDIA_KIND_VIDEO, file)
    rate = ""
    if _is_described(video):
        video, facts = video
        if facts.get("fps") is not None:
            rate = f"fps={float(facts['fps'])};"
    if not isinstance(video, (list, tuple, np.ndarray)) or not len(video):
        raise ValueError(
            "a video must be a path, a data: URL, bytes, or its frames: an array [frames, height, width, 3] or a list "
            f"of pictures, not {type(video).__name__}"
        )
    pictures = ",".join(base64.b64encode(_frame(frame)).decode() for frame in video)
    return GivenMedia(MEDIA_KIND_VIDEO, f"{_LISTED};{rate}base64,{pictures}".encode())


def _is_described(video: object) -> bool:
    return isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping)


def _frame(frame: Any) -> bytes:
    from PIL import Image

    if not (hasattr(frame, "save") and hasattr(frame, "mode")):
        pixels = np.asarray(frame)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"a frame must be [height, width, 3] bytes, not {pixels.shape} of {pixels.dtype}")
        frame = Image.fromarray(pixels)
    return read_image(frame).file


def _is_pair(sound: object) -> bool:
    return isinstance(sound, tuple) and len(sound) == 2 and isinstance(sound[1], (int, float, np.number))


def _samples(sound: object) -> Samples:
    try:
        samples = np.asarray(sound)
    except (TypeError, ValueError, RuntimeError):  # a list of lists of several lengths, or a tensor on a device
        samples = np.asarray(None)
    if samples.dtype.kind != "f":
        raise ValueError(
            "a sound must be an array of floating point samples between -1 and 1, alone or with its rate as (array, "
            f"rate), a path, a data: URL or bytes, not {type(sound).__name__}"
        )
    return samples.astype(np.float32)


def _file_of(what: str, given: object) -> bytes | None:
    """Return the file that a caller names or gives; None: it is none. Raises ``ValueError``."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, str) and given.startswith(_DATA_URL):
        return _of_data_url(what, given)
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        raise ValueError(f"{what} must be given, as a file or a data: URL for example; URLs are not fetched")
    if isinstance(given, (str, Path)):
        try:
            return Path(str(given).removeprefix("file://")).read_bytes()
        except OSError as error:
            raise ValueError(f"the file of {what} {str(given)!r} cannot be read: {error.strerror}") from None
    return None


def _of_data_url(what: str, url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"a data: URL of {what} must have ;base64")
    return _of_base64(f"a data: URL of {what}", data)


def _of_base64(what: str, data: object) -> bytes:
    try:
        return base64.b64decode(data, validate=True)  # type: ignore[arg-type]
    except (TypeError, binascii.Error, ValueError):
        raise ValueError(f"{what} is not base64") from None


def take_media(message: Mapping[str, Any], media: list[GivenMedia]) -> Mapping[str, Any]:
    """Return a turn whose images and sounds have become marks for the chat template; adds them to ``media``. Turns
    without any are as they were. Raises ``ValueError``."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return message
    num_before, parts = len(media), [_marked(part, media) for part in content]
    return {**message, "content": parts} if len(media) > num_before else message


def _marked(part: object, media: list[GivenMedia]) -> object:
    """Return the mark of an image, a video or a sound, which is added to ``media``, or another part as it is."""
    if not isinstance(part, Mapping):
        return part
    kind = str(part.get("type"))
    if kind == "input_video":
        raise ValueError(f"a part of type {kind}: give a video as a part of type video_url or video")
    if (key := _KEYS.get(kind)) is None:
        return part
    value = part.get(key)
    value = value["url"] if isinstance(value, Mapping) and "url" in value else value
    read = read_sound if kind in _SOUND_KEYS else read_video if kind in _VIDEO_KEYS else read_image
    media.append(read(value))
    return MARKS[media[-1].kind]


def media_of(data: object) -> list[GivenMedia]:
    """Return what ``multi_modal_data`` holds: an image or a list under ``image``, a video or a list under ``video``, a
    sound or a list under ``audio``. Raises ``ValueError``."""
    if not isinstance(data, Mapping) or data.keys() - {"image", "audio", "video"}:
        raise ValueError("multi_modal_data must be a mapping with image, video or audio, and nothing else")
    images, sounds = data.get("image"), data.get("audio")
    several = images if isinstance(images, (list, tuple)) else () if images is None else (images,)
    videos = _videos(data.get("video"))
    return [*map(read_image, several), *map(read_video, videos), *map(read_sound, _sounds(sounds))]


def _videos(given: Any) -> Iterable[object]:
    """Return one video or several as several. A list of pictures is one."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or _is_described(given) or not given:
        return (given,)
    first = given[0]
    is_frame = hasattr(first, "mode") or (isinstance(first, np.ndarray) and first.ndim == 3)
    return (given,) if is_frame else given


def _sounds(given: object) -> Iterable[object]:
    """Return one sound or several as several. A list of numbers is one."""
    if given is None:
        return ()
    is_list = isinstance(given, (list, tuple)) and not _is_pair(given)
    if not is_list or isinstance(next(iter(given), None), (int, float)):  # type: ignore[call-overload]
        return (given,)
    return given  # type: ignore[return-value]


class OfflineMedia:
    """Expands the images or sounds of prompts for one model, and computes their rows. The first one loads the tower."""

    def __init__(self, path: Path, tokenizer: Tokenizer, worker: WorkerConfig) -> None:
        """``path``: the checkpoint's directory. ``worker``: says where and how numbers are computed."""
        self._path = path
        self._tokenizer = tokenizer
        self._worker = worker
        self._rows: OrderedDict[RowsKey, Samples] = OrderedDict()  # the least recently used first
        self._num_bytes = 0

    def expand(
        self,
        rendered: Rendered,
        given: Sequence[GivenMedia],
        salt: bytes = b"",
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Rendered, PromptMedia]:
        """Return the text of a prompt with the tokens of its media, which have no places yet. ``options``: of their
        processor. Raises ``ValueError``, or ``InvalidArgument`` for what the model does not take."""
        if self._reader is None:
            raise ValueError("this model reads text only")
        files: dict[bytes, bytes | Samples] = {}
        for index, each in enumerate(given):
            self._reader.check_kind(index, each.kind)
        given = [given[index] for index in self._reader.order(rendered.text, [each.kind for each in given])]
        sizes = [self._size(each, files) for each in given]
        if options:
            packed = _packed(options)
            for size in sizes:
                size.options_json = packed
        text, items = self._reader.expand(rendered.text, sizes, salt)
        return replace(rendered, text=text), PromptMedia(items, files)

    def beside(self, given: Sequence[GivenMedia], salt: bytes = b"") -> PromptMedia | None:
        """Return the sound that stands beside a prompt; None: the model reads images or sounds in prompts. Raises
        ``ValueError``, also for a sound that is longer than what the model hears at once."""
        if self._transcripts is None:
            return None
        if [each.kind for each in given] != [MEDIA_KIND_AUDIO]:
            raise ValueError("this model writes down sound: each prompt has exactly one, and no image")
        files: dict[bytes, bytes | Samples] = {}
        sound = self._sound(given[0], files)
        traits = self._transcripts.traits
        if sound.samples > traits.piece_samples:
            raise ValueError(
                f"the sound has {sound.samples / traits.sampling_rate:.1f} seconds, and this model hears "
                f"{traits.piece_samples / traits.sampling_rate:g} at once: cut it, or send it to a server's "
                "/v1/audio/transcriptions"
            )
        piece = EncodeTranscriptRequest(sound=sound, samples=sound.samples, cache_salt=salt)
        return PromptMedia(self._transcripts.encode(piece).media, files)

    @property
    def marks(self) -> list[str]:
        """What the chat template writes for images, videos or sounds."""
        return [] if self._reader is None else self._reader.marks

    def place(self, media: PromptMedia, token_ids: list[int]) -> None:
        """Give images and sounds their places in a prompt's tokens. Raises ``InvalidArgument``."""
        assert self._reader is not None, "expanded by a reader"
        self._reader.place(media.items, token_ids)

    def rows(self, media: PromptMedia, key: RowsKey) -> Samples:
        """Return the rows of one of a prompt's images or sounds, [num_rows, levels * hidden_size]. Raises
        ``ValueError`` for one that cannot be computed."""
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
            return rows
        item = media.by_rows[key]
        try:
            rows = self._tower.rows(self._prepared(item, media.files[item.digest]))
            if len(rows) != item.num_rows:
                raise ValueError(f"the tower makes {len(rows)} rows where the prompt has {item.num_rows} tokens")
        except (ValueError, TokenloomError) as error:
            name = {MEDIA_KIND_AUDIO: "sound", MEDIA_KIND_VIDEO: "video"}.get(item.kind, "image")
            raise ValueError(f"{name} {item.index + 1} of the prompt cannot be read: {error}") from None
        self._keep(key, rows)
        return rows

    def reset(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self._num_bytes = 0

    def use_weights(self, path: Path) -> None:
        """Compute rows with the weights of another checkpoint of the same model from now on."""
        self.reset()
        self._path = path
        self.__dict__.pop("_tower", None)  # the next image or sound loads it

    @cached_property
    def _reader(self) -> MediaReader | None:
        return None if self._worker.language_model_only else MediaReader.of_checkpoint(self._path, self._tokenizer)

    @cached_property
    def _transcripts(self) -> TranscriptPrompts | None:
        return TranscriptPrompts.of_checkpoint(self._path, self._tokenizer)

    @cached_property
    def _processor(self) -> "Processor":
        from tokenloom.gpu_worker.towers.processor import Processor

        return Processor(self._path)

    @cached_property
    def _sound_processor(self) -> "SoundProcessor":
        from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor

        return SoundProcessor(self._path)

    @cached_property
    def _tower(self) -> "Tower | SoundTower":
        from tokenloom.gpu_worker.towers.sound_tower import SoundTower
        from tokenloom.gpu_worker.towers.tower import Tower

        device = self._worker.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        hears = self._transcripts is not None
        if self._reader is not None:
            hears = self._reader.family.kind == MEDIA_KIND_AUDIO
        made = SoundTower if hears else Tower
        return made(self._path, self._worker.dtype, device)

    def _size(self, given: GivenMedia, files: dict[bytes, bytes | Samples]) -> MediaSize:
        """Return what the reader has to know of one of a prompt's media, which is added to ``files``."""
        if given.kind == MEDIA_KIND_AUDIO:
            return self._sound(given, files)
        return _video(given, files) if given.kind == MEDIA_KIND_VIDEO else _image(given, files)

    def _sound(self, given: GivenMedia, files: dict[bytes, bytes | Samples]) -> MediaSize:
        """Return what the reader has to know of a sound, whose samples are added to ``files``."""
        from tokenloom.gpu_worker.towers.sound_file import read_sound as decoded
        from tokenloom.gpu_worker.towers.sound_file import resampled

        rate = self._sound_processor.sampling_rate
        if given.samples is None:
            samples = decoded(given.file, rate)
        else:
            samples = resampled(given.samples, given.rate or rate, rate)
        digest = sha256(samples.tobytes()).digest()
        files[digest] = samples
        return MediaSize(digest=digest, kind=MEDIA_KIND_AUDIO, samples=len(samples))

    def _prepared(self, item: MediaItem, file: bytes | Samples) -> "Pixels":
        if isinstance(file, bytes) and item.kind == MEDIA_KIND_VIDEO:
            return self._processor.frames(file, json.loads(item.options_json))
        if isinstance(file, bytes):
            options = json.loads(item.options_json) if item.options_json else {}
            return self._processor.pixels(file, options, num_in_prompt=item.num_in_prompt)
        return self._sound_processor.features(file)

    def _keep(self, key: RowsKey, rows: Samples) -> None:
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > _KEPT_BYTES:
            _, dropped = self._rows.popitem(last=False)
            self._num_bytes -= dropped.nbytes


def _packed(options: object) -> bytes:
    """Return options of the processor as messages have them; the reader checks each. Raises ``ValueError``."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError("mm_processor_kwargs must be a mapping of names to numbers")
    try:
        return json.dumps(dict(options), allow_nan=False).encode()
    except TypeError:
        raise ValueError("mm_processor_kwargs must be a mapping of names to numbers") from None


def _image(given: GivenMedia, files: dict[bytes, bytes | Samples]) -> MediaSize:
    """Return what the reader has to know of an image, whose file is added to ``files``."""
    from tokenloom.gpu_worker.towers.image_file import image_size

    size, digest = image_size(given.file), sha256(given.file).digest()
    files[digest] = given.file
    return MediaSize(digest=digest, kind=MEDIA_KIND_IMAGE, width=size.width, height=size.height)


def _video(given: GivenMedia, files: dict[bytes, bytes | Samples]) -> MediaSize:
    """Return what the reader has to know of a video, whose file is added to ``files``."""
    from tokenloom.gpu_worker.towers.video_file import video_facts

    facts, digest = video_facts(given.file), sha256(given.file).digest()
    files[digest] = given.file
    return MediaSize(
        digest=digest,
        kind=MEDIA_KIND_VIDEO,
        width=facts.width,
        height=facts.height,
        frames=facts.frames,
        frame_rate=facts.rate,
    )
