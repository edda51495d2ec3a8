"""Computes the rows of images with the vision tower of a checkpoint, which transformers' modules are.

Only the tower and its projector are kept: the decoder is given no layers, and its embeddings are dropped.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from ..models.transformers.loading import quietly
from .processor import Pixels

Rows = npt.NDArray[np.float32]
_FROM_CONFIG = ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
"""``forward`` takes these from the configuration, ``get_image_features`` not in every class."""
_DECODERS = ("language_model", "text_model")
_NO_DECODER: dict[str, Any] = {"num_hidden_layers": 0, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""In Gemma 4 each layer has embeddings of its own."""
_OF_DECODER = ("lm_head", "language_model", "text_model", "embed_tokens", "per_layer")


class Tower:
    """Holds the weights of one tower.

    Attributes:
        width: Numbers in a row.
        levels: Rows side by side in one (deepstack); ``width`` is a multiple of it.
        device: Where it is computed.
    """

    def __init__(self, path: Path, dtype: str = "auto", device: str = "cpu", threads: int = 0) -> None:
        """Load the tower of a checkpoint directory.

        ``dtype``: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's. ``device``: as torch names
        it, or ``auto`` for a GPU if one is available. ``threads``: of the whole process, on CPUs; 0: as they are.
        Raises ``ValueError`` for a checkpoint without a tower, or one whose tower is stored in a form that is not read.
        """
        device = chosen_device(device, threads)
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
        self._body = self._body.to(device).eval()
        self._config = config
        known = inspect.signature(self._body.get_image_features).parameters
        self._known = frozenset(known)
        self._settings = {name: getattr(config, name) for name in _FROM_CONFIG if name in known}
        self.device = device
        self._dtype = next(self._body.parameters()).dtype
        self.levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        self.width = self.levels * hidden_size

    @property
    def is_bfloat16(self) -> bool:
        """Whether the rows lose nothing as bfloat16 numbers."""
        return bool(self._dtype == torch.bfloat16)

    @torch.inference_mode()
    def rows(self, pixels: Pixels) -> Rows:
        """Return the rows of one image, [num_rows, width]. Raises ``ValueError`` for an image whose rows are not
        finite, ``MemoryError`` if the device has no room for it."""
        try:
            given = {name: self._tensor(value) for name, value in pixels.items() if name in self._known}
            output = self._body.get_image_features(**given, **self._settings, return_dict=True)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        levels = [_flat(output.pooler_output), *map(_flat, getattr(output, "deepstack_features", None) or ())]
        return finite(torch.cat(levels, dim=-1).float().cpu().numpy(), self.width)

    def rows_of(self, images: Sequence[Pixels]) -> list[Rows]:
        """Return the rows of several images, computed one after the other. Raises as :meth:`rows`."""
        return list(map(self.rows, images))

    def _tensor(self, value: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(value).to(self.device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def chosen_device(device: str, threads: int) -> str:
    """Return where to compute, as torch names it; sets the threads of the process. Arguments as those of
    :class:`Tower`."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


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


def _flat(rows: Any) -> Tensor:
    parts = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
