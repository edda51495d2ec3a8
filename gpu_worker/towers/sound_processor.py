"""Turns samples into log-mel features, as transformers' ``WhisperFeatureExtractor`` does without torch."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import transformers
from transformers.audio_utils import window_function

from .processor import Pixels
from .sound_file import BadSound, Samples

_KIND = "WhisperFeatureExtractor"
_MEL_FLOOR = 1e-10
_RANGE = 8.0
"""Decades below the loudest number of a sound; what is quieter counts as that."""


class Piece(NamedTuple):
    """Says where a piece lies in its sound.

    Attributes:
        start, num, total: Its first sample, its samples, and those of the whole sound.
        peak: Of the whole sound; None: of what is at hand.
    """

    start: int
    num: int
    total: int
    peak: float | None = None


class SoundProcessor:
    """Prepares the sounds of one checkpoint.

    Attributes:
        sampling_rate: Samples a second that it takes.
        max_samples: Of a piece; shorter ones are prepared as if silence followed.
        hop: Samples from one frame to the next.
        sees_whole: Whether a piece is prepared as a part of its sound, whose loudest moment counts, as Whisper's is;
            otherwise each piece is a sound of its own.
    """

    def __init__(self, path: Path) -> None:
        """Read the checkpoint's settings. Raises ``ValueError`` or ``OSError`` if it has none that can be used."""
        load: Any = transformers.WhisperFeatureExtractor
        settings, _ = load.get_feature_extractor_dict(path, local_files_only=True)
        kind = settings.get("feature_extractor_type", _KIND)
        if kind != _KIND:
            raise ValueError(f"sounds are prepared by {kind}; only {_KIND} is known")
        if settings.get("dither") or settings.get("do_normalize"):
            raise ValueError("sounds are prepared with dither or do_normalize, which is not known")
        extractor = load.from_dict(settings)
        self.sampling_rate: int = extractor.sampling_rate
        self.max_samples: int = extractor.n_samples
        self.hop: int = extractor.hop_length
        config, _ = transformers.PreTrainedConfig.get_config_dict(path, local_files_only=True)
        self.sees_whole = config.get("model_type") == "whisper"
        self._size: int = extractor.n_fft
        self._filters: npt.NDArray[np.float64] = np.ascontiguousarray(extractor.mel_filters.T)

    @property
    def margin(self) -> int:
        """Samples on both sides of a piece that its features depend on."""
        return self._size // 2

    def features(self, samples: Samples, piece: Piece | None = None) -> Pixels:
        """Return what the tower needs of a piece: log-mel features [1, bins, frames], and the number of frames that it
        fills. Raises :class:`.BadSound` for a piece that is empty, too long, or begins between frames.

        ``samples``: of a sound. ``piece``: None: it is one by itself; otherwise those of :meth:`window`.
        """
        piece = piece or Piece(0, len(samples), len(samples))
        self._check(piece)
        if not self.sees_whole:
            piece = Piece(0, piece.num, piece.num)
        num_frames = -(-piece.num // self.hop)
        first, _ = self.window(piece)
        values = np.log10(self.mel(self._framed(samples, first, piece)))
        peak = values.max() if piece.peak is None else piece.peak
        levels = values.astype(np.float32)
        levels = (np.maximum(levels, np.float32(peak) - np.float32(_RANGE)) + np.float32(4)) / np.float32(4)
        features = np.zeros((1, len(levels), self.max_samples // self.hop), np.float32)
        features[0, :, : levels.shape[1]] = levels
        return {"input_features": features, "num_frames": np.array([num_frames])}

    def window(self, piece: Piece) -> tuple[int, int]:
        """Return the range of samples that the features of a piece depend on."""
        if not self.sees_whole:
            return piece.start, piece.start + piece.num
        return max(0, piece.start - self.margin), min(piece.total, piece.start + piece.num + self.margin)

    def _check(self, piece: Piece) -> None:
        if not (0 < piece.num <= self.max_samples and 0 <= piece.start <= piece.total - piece.num):
            most, rate = self.max_samples / self.sampling_rate, self.sampling_rate
            raise BadSound(
                f"{piece.num / rate:g} s from {piece.start / rate:g} s on are not a piece of a sound of "
                f"{piece.total / rate:g} s; it may have {most:g} s at most."
            )
        if self.sees_whole and piece.start % self.hop:
            raise BadSound(f"A piece must begin at a multiple of {self.hop} samples.")
        if self.sees_whole and piece.num < self.hop:
            raise BadSound(f"A piece must have {self.hop} samples at least.")

    def _framed(self, samples: Samples, first: int, piece: Piece) -> Samples:
        """Return the samples of a piece's frames, with what the extractor puts around a sound: silence behind a short
        one, and then its mirror image at both ends. ``first``: where ``samples`` begin in the sound."""
        length = max(piece.total, self.max_samples)
        is_last = piece.start + piece.num == piece.total
        num_frames = (length - piece.start if is_last else piece.num) // self.hop
        end = piece.start + (num_frames - 1) * self.hop + self.margin
        places = np.abs(np.arange(piece.start - self.margin, end))
        places = np.where(places >= length, 2 * (length - 1) - places, places)
        return np.where(places < piece.total, samples[np.clip(places - first, 0, len(samples) - 1)], np.float32(0))

    def mel(self, samples: Samples) -> npt.NDArray[np.float64]:
        """Return the mel spectrum [bins, frames] of as many frames as fit."""
        windows = np.lib.stride_tricks.sliding_window_view(samples, self._size)[:: self.hop]
        spectrum = np.fft.rfft(windows * self._window).astype(np.complex64).T
        power = np.abs(spectrum, dtype=np.float64) ** 2.0
        mel: npt.NDArray[np.float64] = np.maximum(_MEL_FLOOR, np.dot(self._filters, power))
        return mel

    @cached_property
    def _window(self) -> npt.NDArray[np.float64]:
        return window_function(self._size, "hann")


class PeakMeter:
    """Finds the peak of a sound that arrives block by block; see :class:`Piece`."""

    def __init__(self, processor: SoundProcessor) -> None:
        self._processor = processor
        self._left: Samples = np.zeros(0, np.float32)  # what further frames need
        self._total = 0
        self._peak = math.log10(_MEL_FLOOR)

    def add(self, block: Samples) -> None:
        """Take the next samples."""
        margin, is_begun = self._processor.margin, self._total > self._processor.margin
        self._left = np.concatenate((self._left, block))
        self._total += len(block)
        if self._total > margin:
            if not is_begun:
                self._left = np.concatenate((self._left[margin:0:-1], self._left))
            self._measure()

    def peak(self) -> float:
        """Return the peak of all samples. Call it once, after the last one."""
        margin, missing = self._processor.margin, self._processor.max_samples - self._total
        if self._total <= margin:  # shorter than any sound that is taken
            self.add(np.zeros(margin + 1, np.float32))
        behind = np.zeros(max(0, min(missing, 2 * margin)), np.float32)
        self._left = np.concatenate((self._left, behind))
        self._left = np.concatenate((self._left, self._left[-2 : -margin - 2 : -1]))
        # The extractor drops the last frame. Behind a short sound it is silent, as those that are left out here are.
        self._left = self._left[: -self._processor.hop]
        self._measure()
        return self._peak

    def _measure(self) -> None:
        num_frames = (len(self._left) - 2 * self._processor.margin) // self._processor.hop + 1
        if num_frames > 0:
            self._peak = max(self._peak, float(np.log10(self._processor.mel(self._left).max())))
            self._left = self._left[num_frames * self._processor.hop :]
