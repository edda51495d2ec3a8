"""Computes the rows of sounds with the encoder of a checkpoint, which transformers' modules are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from ..models.transformers.loading import quietly
from .processor import Pixels
from .tower import Rows, chosen_device, drop_decoder, finite, placed, round_layers


class _Family(Protocol):
    """Computes the rows of several pieces at once."""

    def __call__(self, body: Any, features: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
        """``features``: [n, bins, frames]. Returns [rows, width] for each piece."""


def _whisper(body: Any, features: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
    # Silence counts: the rows of a short piece are as many as those of a long one.
    return list(body.encoder(features).last_hidden_state)


def _qwen2_audio(body: Any, features: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
    tower = body.audio_tower
    num_positions = (features.shape[-1] - 2) // 2 + 1
    frames = torch.tensor(num_frames, device=features.device)
    filled, num_rows = tower._get_feat_extract_output_lengths(frames)
    is_filled = torch.arange(num_positions, device=features.device) < filled[:, None]
    shape = features.new_zeros(len(num_frames), num_positions, 1)
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=shape, attention_mask=is_filled.long())
    rows = body.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
    return [each[:count] for each, count in zip(rows, num_rows.tolist(), strict=True)]


_FAMILIES: dict[str, _Family] = {"whisper": _whisper, "qwen2_audio": _qwen2_audio}


class SoundTower:
    """Holds the weights of one tower.

    Attributes:
        width: Numbers in a row.
        device: Where it is computed.
    """

    def __init__(
        self, path: Path, dtype: str = "auto", device: str = "cpu", threads: int = 0, quantization: str = ""
    ) -> None:
        """Load the tower of a checkpoint directory; arguments and errors as those of :class:`.Tower`."""
        device = chosen_device(device, threads, quantization)
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        if config.model_type not in _FAMILIES:
            raise ValueError(f"{path} has no tower of sounds that is computed")
        self._rows = _FAMILIES[config.model_type]
        if config.model_type == "whisper":
            config.decoder_layers, self.width = 0, config.d_model
        else:
            self.width = drop_decoder(config)
        load: Any = transformers.AutoModel.from_pretrained
        with quietly():
            body, report = load(
                path,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        missing = [name for name in report["missing_keys"] if not name.startswith(("decoder.", "language_model."))]
        if missing or report["mismatched_keys"]:
            raise ValueError(f"{path} lacks weights of its tower: {', '.join(sorted(missing)[:3])} …")
        body.decoder = body.language_model = None
        self._body = placed(body, dtype, device).eval()
        self.device = device
        self._dtype = next(self._body.parameters()).dtype
        round_layers(self._body, self._dtype, quantization)

    @property
    def is_bfloat16(self) -> bool:
        """Whether the rows lose nothing as bfloat16 numbers."""
        return bool(self._dtype == torch.bfloat16)

    def rows(self, features: Pixels) -> Rows:
        """Return the rows of one piece, [num_rows, width]. Raises as :meth:`.Tower.rows`."""
        return self.rows_of([features])[0]

    @torch.inference_mode()
    def rows_of(self, pieces: Sequence[Pixels]) -> list[Rows]:
        """Return the rows of several pieces, computed at once. Raises as :meth:`.Tower.rows`."""
        try:
            features = torch.cat([torch.from_numpy(piece["input_features"]) for piece in pieces])
            num_frames = [int(piece["num_frames"][0]) for piece in pieces]
            rows = self._rows(self._body, features.to(self.device, self._dtype), num_frames)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return [finite(each.float().cpu().numpy(), self.width) for each in rows]
