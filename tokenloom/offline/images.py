"""Images in prompts of the offline API: reads what callers give, and computes rows in this process, as an encoder does
for a mesh."""

import base64
import binascii
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from tokenloom.engine_core.data.config import WorkerConfig
from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.request.errors import TokenloomError
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.services.tokenizer.spelled_tokens import Rendered
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem

if TYPE_CHECKING:  # transformers, which few callers need
    from tokenloom.gpu_worker.towers.processor import Processor
    from tokenloom.gpu_worker.towers.tower import Tower

_KEPT_BYTES: Final = 256 << 20
"""Rows that stay after they were computed, for prompts whose KV was lost."""
_DATA_URL: Final = "data:"
_PART_KEYS: Final = {"image_url": "image_url", "image": "image", "image_pil": "image_pil", "input_image": "image_url"}
"""The types of parts that hold an image, with the key of what it is."""


@dataclass(frozen=True)
class PromptImages:
    """Holds the images of one prompt until it has ended."""

    items: Sequence[MediaItem] = ()
    """With the places of their rows; none before the prompt's tokens are known."""
    files: Mapping[bytes, bytes] = field(default_factory=dict)
    """By digest."""

    @cached_property
    def by_rows(self) -> dict[RowsKey, MediaItem]:
        """The items by the names of their rows in the core."""
        return {RowsKey(item.key, item.num_rows, item.levels): item for item in self.items}


def read_image(image: object) -> bytes:
    """Return the file of an image: a picture of PIL, the path of a file, a data: URL, or its bytes. Raises
    ``ValueError`` for anything else."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and image.startswith(_DATA_URL):
        return _of_data_url(image)
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise ValueError("an image must be a file, a data: URL or a picture of PIL; URLs are not fetched")
    if isinstance(image, (str, Path)):
        try:
            return Path(str(image).removeprefix("file://")).read_bytes()
        except OSError as error:
            raise ValueError(f"the image {str(image)!r} cannot be read: {error.strerror}") from None
    if hasattr(image, "save") and hasattr(image, "mode"):
        file = io.BytesIO()
        image.save(file, "PNG")  # which loses nothing
        return file.getvalue()
    raise ValueError(f"an image must be a picture of PIL, a path, a data: URL or bytes, not {type(image).__name__}")


def _of_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("a data: URL of an image must have ;base64")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a data: URL of an image is not base64") from None


def take_images(message: Mapping[str, Any], images: list[bytes]) -> Mapping[str, Any]:
    """Return a turn whose images have become marks for the chat template; adds their files to ``images``. Turns without
    images are as they were. Raises ``ValueError``."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return message
    parts, found = list[object](), False
    for part in content:
        if isinstance(part, Mapping) and (key := _PART_KEYS.get(str(part.get("type")))) is not None:
            value = part.get(key)
            images.append(read_image(value.get("url") if isinstance(value, Mapping) else value))
            parts.append({"type": "image"})
            found = True
        else:
            parts.append(part)
    return {**message, "content": parts} if found else message


def images_of(data: object) -> list[bytes]:
    """Return the files of ``multi_modal_data``: an image, or a list, under ``image``. Raises ``ValueError``."""
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise ValueError("multi_modal_data must be a mapping with image, and nothing else")
    images = data.get("image")
    several = images if isinstance(images, (list, tuple)) else () if images is None else (images,)
    return list(map(read_image, several))


class OfflineImages:
    """Expands the images of prompts for one model, and computes their rows. The first image loads the tower."""

    def __init__(self, path: Path, tokenizer: Tokenizer, worker: WorkerConfig) -> None:
        """``path``: the checkpoint's directory. ``worker``: says where and how numbers are computed."""
        self._path = path
        self._tokenizer = tokenizer
        self._worker = worker
        self._rows: OrderedDict[RowsKey, npt.NDArray[np.float32]] = OrderedDict()  # the least recently used first
        self._num_bytes = 0

    def expand(self, rendered: Rendered, files: Sequence[bytes], salt: bytes = b"") -> tuple[Rendered, PromptImages]:
        """Return the text of a prompt with the tokens of its images, which have no places yet. Raises ``ValueError``,
        or ``InvalidArgument`` for an image that the model does not take."""
        if self._reader is None:
            raise ValueError("this model reads text only")
        sizes = [self._size(file) for file in files]
        text, items = self._reader.expand(rendered.text, sizes, salt)
        return replace(rendered, text=text), PromptImages(
            items, {item.digest: file for item, file in zip(items, files, strict=True)}
        )

    def place(self, images: PromptImages, token_ids: list[int]) -> None:
        """Give the images their places in a prompt's tokens. Raises ``InvalidArgument``."""
        assert self._reader is not None, "expanded by a reader"
        self._reader.place(images.items, token_ids)

    def rows(self, images: PromptImages, key: RowsKey) -> npt.NDArray[np.float32]:
        """Return the rows of one of a prompt's images, [num_rows, levels * hidden_size]. Raises ``ValueError`` for an
        image that cannot be computed."""
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
            return rows
        item = images.by_rows[key]
        try:
            rows = self._compute(item, images.files[item.digest])
        except (ValueError, TokenloomError) as error:
            raise ValueError(f"image {item.index + 1} of the prompt cannot be read: {error}") from None
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
        self.__dict__.pop("_tower", None)  # the next image loads it

    @cached_property
    def _reader(self) -> MediaReader | None:
        return None if self._worker.language_model_only else MediaReader.of_checkpoint(self._path, self._tokenizer)

    @cached_property
    def _processor(self) -> "Processor":
        from tokenloom.gpu_worker.towers.processor import Processor

        return Processor(self._path)

    @cached_property
    def _tower(self) -> "Tower":
        from tokenloom.gpu_worker.towers.tower import Tower

        device = self._worker.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Tower(self._path, self._worker.dtype, device)

    def _size(self, file: bytes) -> MediaSize:
        from tokenloom.gpu_worker.towers.image_file import image_size

        size = image_size(file)
        return MediaSize(digest=sha256(file).digest(), kind=MEDIA_KIND_IMAGE, width=size.width, height=size.height)

    def _compute(self, item: MediaItem, file: bytes) -> npt.NDArray[np.float32]:
        pixels = self._processor.pixels(file, num_in_prompt=item.num_in_prompt)
        rows = self._tower.rows(pixels)
        if len(rows) != item.num_rows:
            raise ValueError(f"the tower makes {len(rows)} rows where the prompt has {item.num_rows} tokens")
        return rows

    def _keep(self, key: RowsKey, rows: npt.NDArray[np.float32]) -> None:
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > _KEPT_BYTES:
            _, dropped = self._rows.popitem(last=False)
            self._num_bytes -= dropped.nbytes
