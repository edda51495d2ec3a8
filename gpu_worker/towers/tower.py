"""Computes the rows of images with the vision tower of a checkpoint, which transformers' modules are.

Only the tower and its projector are kept: the decoder is given no layers, and its embeddings are dropped.
"""

import hashlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from ..cuda.step_tensors import Capture, Graph, GraphCapture
from ..models.transformers.loading import quietly
from .processor import Pixels

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.float32]
_Key = tuple[tuple[str, tuple[int, ...], bytes], ...]
_MAX_GRAPHS = 16
"""Each keeps the inputs and the activations of an image of its size."""
_MAX_SIZES = 1024
"""Sizes that are remembered until they come again."""
_FROM_CONFIG = ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
"""``forward`` takes these from the configuration, ``get_image_features`` not in every class."""
_OF_VIDEOS = "pixel_values_videos"
"""The argument of towers that do more with the frames of a video than with images."""
_DECODERS = ("language_model", "text_model")
_NO_DECODER: dict[str, Any] = {"num_hidden_layers": 0, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""In Gemma 4 each layer has embeddings of its own."""
_OF_DECODER = ("lm_head", "language_model", "text_model", "embed_tokens", "per_layer")


class TowerGraphs:
    """Computes images of a size that has come before from a graph of the device, which starts all kernels at once.

    Attributes:
        num_replays: Calls that were computed so.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graphs: dict[_Key, tuple[Graph, dict[str, Tensor]] | None] = {}  # None: it cannot be captured
        self._seen: set[_Key] = set()
        self.num_replays = 0

    def compute(self, key: _Key, given: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Return what ``call`` makes of ``given``. The next call may overwrite it. ``key``: tells apart calls with
        other shapes or other integers."""
        if key not in self._graphs:
            is_new = key not in self._seen
            if is_new or len(self._graphs) >= _MAX_GRAPHS:
                self._note(key)
                return call(given)
            try:
                self._graphs[key] = self._captured(given, call)
            except torch.OutOfMemoryError:  # there may be room when the size comes again
                self._seen.discard(key)
                return call(given)
        if (found := self._graphs[key]) is None:
            return call(given)
        graph, inputs = found
        for name, tensor in given.items():
            inputs[name].copy_(tensor)
        graph.replay()
        self.num_replays += 1
        return graph.results[0]

    def _captured(
        self, given: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Tensor]
    ) -> tuple[Graph, dict[str, Tensor]] | None:
        """Return the graph of a call and what it reads; None: it has none. Raises ``torch.OutOfMemoryError``."""
        inputs = {name: tensor.clone() for name, tensor in given.items()}
        try:
            return self._capture(lambda: [call(inputs)]), inputs
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a tower that asks the device for numbers in between, for example
            log.info("images of a size are computed without a graph: %s", error)
            return None

    def _note(self, key: _Key) -> None:
        if len(self._seen) >= _MAX_SIZES:
            self._seen.clear()
        self._seen.add(key)


class _Features(NamedTuple):
    """Describes the method of a whole model that computes rows.

    Attributes:
        method: Its name.
        names: The arguments that it has.
        settings: Those that it gets from the configuration.
    """

    method: str
    names: frozenset[str]
    settings: dict[str, Any]

    @classmethod
    def of(cls, body: Any, method: str, config: Any) -> "_Features":
        names = frozenset(inspect.signature(getattr(body, method)).parameters)
        return cls(method, names, {name: getattr(config, name) for name in _FROM_CONFIG if name in names})


class Tower:
    """Holds the weights of one tower.

    Attributes:
        width: Numbers in a row.
        levels: Rows side by side in one (deepstack); ``width`` is a multiple of it.
        device: Where it is computed.
    """

    def __init__(
        self, path: Path, dtype: str = "auto", device: str = "cpu", threads: int = 0, quantization: str = "",
        *, has_graphs: bool = False,
    ) -> None:  # fmt: skip
        """Load the tower of a checkpoint directory.

        ``dtype``: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's, and bfloat16 on a CPU if
        that is float16. ``device``: as torch names it, or ``auto`` for a GPU if one is available. ``threads``: of the
        whole process, on CPUs; 0: as they are. ``quantization``: ``int8-dynamic`` or ``int4``, as the engine rounds
        linear layers; empty: none are rounded. ``has_graphs``: whether images of sizes that came before are computed
        from graphs, on a GPU. Raises ``ValueError`` for a checkpoint without a tower, one whose tower is stored in a
        form that is not read, and for what the device does not do.
        """
        device = chosen_device(device, threads, quantization)
        if has_graphs and not device.startswith("cuda"):
            raise ValueError(f"graphs of a tower are those of a GPU; leave tower_graphs out on {device}")
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        hidden_size = drop_decoder(config)
        try:
            load: Any = transformers.AutoModelForImageTextToText.from_pretrained
            with quietly():
                # The class is that of the installed library: code that comes with a checkpoint is never run.
                model, report = load(
                    path,
                    config=config,
                    dtype=dtype,
                    trust_remote_code=False,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} has no tower that is computed: {error}") from error
        missing = [name for name in report["missing_keys"] if not any(part in name for part in _OF_DECODER)]
        if missing or report["mismatched_keys"]:
            raise ValueError(f"{path} lacks weights of its tower: {', '.join(sorted(missing)[:3])} …")
        self._body = model.model
        for name in _DECODERS:
            if getattr(self._body, name, None) is not None:
                setattr(self._body, name, None)
        self._body = placed(self._body, dtype, device).eval()
        self._images = self._videos = _Features.of(self._body, "get_image_features", config)
        if hasattr(self._body, "get_video_features"):
            self._videos = _Features.of(self._body, "get_video_features", config)
        # Its attention takes all patches of a call, under a mask as large as their square.
        self._joins_images = getattr(config.vision_config, "model_type", "") == "pixtral"
        self.device = device
        self._dtype = next(self._body.parameters()).dtype
        round_layers(self._body, self._dtype, quantization)
        self._graphs = TowerGraphs(GraphCapture()) if has_graphs else None
        self.levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        self.width = self.levels * hidden_size

    @property
    def is_bfloat16(self) -> bool:
        """Whether the rows lose nothing as bfloat16 numbers."""
        return bool(self._dtype == torch.bfloat16)

    @torch.inference_mode()
    def rows(self, pixels: Pixels) -> Rows:
        """Return the rows of one image or video, [num_rows, width]. Raises ``ValueError`` if its rows are not finite,
        ``MemoryError`` if the device has no room for it."""
        try:
            known = (self._videos if _OF_VIDEOS in pixels else self._images).names
            given = {name: self._tensor(value) for name, value in pixels.items() if name in known}
            rows = self._rows(given) if self._graphs is None else self._graphs.compute(_key(pixels), given, self._rows)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return finite(rows.float().cpu().numpy(), self.width)

    def _rows(self, given: dict[str, Tensor]) -> Tensor:
        features = self._videos if _OF_VIDEOS in given else self._images
        output = getattr(self._body, features.method)(**given, **features.settings, return_dict=True)
        levels = [_flat(output.pooler_output), *map(_flat, getattr(output, "deepstack_features", None) or ())]
        return torch.cat(levels, dim=-1)

    def rows_of(self, images: Sequence[Pixels]) -> list[Rows]:
        """Return the rows of several images; those of one size are computed at once. Raises as :meth:`rows`."""
        found: dict[int, Rows] = {}
        for places in self._batches(images):
            rows = self.rows(_joined([images[place] for place in places]))
            found |= zip(places, np.split(rows, len(places)), strict=True)
        return [found[place] for place in range(len(images))]

    def _batches(self, images: Sequence[Pixels]) -> Iterable[list[int]]:
        """Return the places of images that are computed together: those of one size, which have as many rows."""
        if self._joins_images or len(images) == 1:
            return [[place] for place in range(len(images))]
        alike = defaultdict[_Key, list[int]](list)
        for place, image in enumerate(images):
            alike[_key(image)].append(place)
        return alike.values()

    def _tensor(self, value: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(value).to(self.device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def chosen_device(device: str, threads: int, quantization: str) -> str:
    """Return where to compute, as torch names it; sets the threads of the process. Arguments as those of
    :class:`Tower`. Raises ``ValueError`` where no rounded layers are computed."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if quantization and not device.startswith("cpu"):
        raise ValueError(f"{quantization} of a tower is computed on CPUs; leave tower_quantization out on {device}")
    return device


def placed(body: Any, dtype: str, device: str) -> Any:
    """Return a tower that was loaded as ``dtype`` says where it computes, in the numbers in which it does."""
    if dtype == "auto" and device.startswith("cpu"):
        # A processor without instructions for float16 takes eight times as long for it as for bfloat16. One by one:
        # the frequencies of rotations stay float32.
        for each in (*body.parameters(), *body.buffers()):
            if each.dtype == torch.float16:
                each.data = each.data.to(torch.bfloat16)
    return body.to(device)


def round_layers(body: Any, dtype: torch.dtype, quantization: str) -> None:
    """Round the linear layers of a tower. Raises ``ValueError`` for a dtype in which such layers do not compute."""
    if not quantization:
        return
    if dtype == torch.float16:
        raise ValueError(f"{quantization} of a tower needs bfloat16 or float32: set dtype")
    # Here: with the kernels of linear layers, which other towers do not need.
    from ..models.transformers.modules import replace_modules
    from ..ops.torch_ops import TorchOps

    with torch.inference_mode():
        replace_modules(body, None, TorchOps(), quantization)


def finite(rows: Rows, width: int) -> Rows:
    """Return rows. Raises ``ValueError`` if they do not have ``width`` numbers, or some are not finite."""
    if rows.shape[1] != width:
        raise ValueError(f"the tower's rows have {rows.shape[1]} numbers instead of {width}")
    if not np.isfinite(rows).all():
        raise ValueError("the tower's rows are not finite")
    return rows


def drop_decoder(config: Any) -> int:
    """Leave no layers to the decoder. Returns the size of its rows."""
    text = config.get_text_config()
    for name, value in _NO_DECODER.items():
        if hasattr(text, name):
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = []
    # Checkpoints in few bits leave their towers as they were; one that does not lacks weights, which is noticed.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    hidden_size: int = text.hidden_size
    return hidden_size


def _joined(images: Sequence[Pixels]) -> Pixels:
    if len(images) == 1:  # as it is: of an image alone 40 MB are not copied
        return images[0]
    return {name: np.concatenate([each[name] for each in images]) for name in images[0]}


def _key(pixels: Pixels) -> _Key:
    """Return what is equal in images of one size: where pixels are padded, integers say how many of them are the
    image's."""
    return tuple(
        (name, values.shape, b"" if values.dtype.kind == "f" else hashlib.sha256(values.tobytes()).digest())
        for name, values in sorted(pixels.items())
    )


def _flat(rows: Any) -> Tensor:
    parts = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
