"""Holds the images and videos of the batch's rows: where their rows enter a step, which rotary positions tokens have
behind and inside them, and which of their tokens see later ones. No step of requests without images comes here."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan

from ..attention.cross_backend import StepCross, WrittenRows
from .prompt_rows import TokenRows

Ints = npt.NDArray[np.int64]


def rope_positions(media: Sequence[MediaSpan], start: int, end: int) -> Ints:
    """Return the rotary positions [3, end - start] of a prompt's tokens: by frame, line and column.

    Inside an image with a grid they count its frames, lines and columns from the place of the image on. Behind it they
    go on after the largest of these, so that later tokens are nearer than their index says, or farther behind a video
    of few rows; see :func:`shift_behind`.
    """
    positions = np.tile(np.arange(start, end), (3, 1))
    shift = 0
    for span in media:
        if span.position >= end:
            break
        if not any(span.grid):
            continue
        first, last = max(span.position, start), min(span.end, end)
        if first < last:
            places = np.unravel_index(np.arange(first, last) - span.position, span.grid)
            turned = np.stack((_times(span, places[0]), *places[1:]))
            positions[:, first - start : last - start] = span.position + shift + turned
        change = _change(span)
        positions[:, max(span.end - start, 0) :] += change
        shift += change
    return positions


def shift_behind(media: Sequence[MediaSpan]) -> int:
    """Return what is added to the index of a token behind all images to get its rotary position; 0 without grids."""
    return sum(_change(span) for span in media if any(span.grid))


def _times(span: MediaSpan, frames: Ints) -> Ints:
    """Return the positions in time of frames, counted from the first one of their span."""
    return (frames.astype(np.float32) * np.float32(span.frame_step)).astype(np.int64)


def _change(span: MediaSpan) -> int:
    # Behind a video, as Qwen's models were trained, vLLM computes, and transformers before 5.3 did: after the last
    # frame's time. Since then transformers goes on after the lines and columns alone, within the times of a long video.
    frames, lines, columns = span.grid
    last = int(_times(span, np.array([frames - 1]))[0])
    return max(last + 1, lines, columns) - span.num_tokens


@dataclass(frozen=True, slots=True)
class _Images:
    """Holds those of one row."""

    spans: list[MediaSpan]
    end: int
    """The position behind the last one."""
    shift: int
    """Of the rotary positions behind the last one."""
    is_turned: bool
    """Whether any has a grid."""


class StepMedia(NamedTuple):
    """Holds what images add to a step of T tokens."""

    embeds: list[TokenRows]
    limits: Ints | None
    """[T]: the last position that each token sees; None: its own."""


class MediaRows:
    """Maps rows of the input batch to the images of their prompts."""

    def __init__(self, max_num_seqs: int) -> None:
        self.images: dict[int, _Images] = {}
        """Those of the rows that have any; only the methods change it."""
        self.shifts = np.zeros(max_num_seqs, dtype=np.int64)
        """[max_num_seqs]: what is added to the index of a row's token behind its images to get its rotary position."""
        self._ends = np.zeros(max_num_seqs, dtype=np.int64)  # of the last image with a grid; 0: there is none
        self._num_turned = 0

    def add(self, row: int, media: list[MediaSpan]) -> None:
        """Note the images of a row, in order of position."""
        is_turned = any(any(span.grid) for span in media)
        images = self.images[row] = _Images(media, media[-1].end, shift_behind(media), is_turned)
        if is_turned:
            self._num_turned += 1
            self.shifts[row], self._ends[row] = images.shift, images.end

    def remove(self, row: int) -> None:
        """Drop the images of a row, if it has any."""
        images = self.images.pop(row, None)
        if images is not None and images.is_turned:
            self._num_turned -= 1
            self.shifts[row] = self._ends[row] = 0

    def turn(self, row: int) -> bool:
        """Return whether the rotary positions of a row's tokens are not their indices."""
        return bool(self._ends[row])

    def rope(self, rows: Ints, starts: Ints, lengths: Ints, positions: Ints) -> Ints | None:
        """Return the rotary positions of a step that computes ``lengths`` tokens from position ``starts`` on of these
        rows, all [R]; None: they are ``positions`` [T].

        [T] if the step's tokens are behind all images with grids, so that each has its position plus the shift of its
        row; otherwise [3, T]: by frame, line and column.
        """
        if not self._num_turned or not (ends := self._ends[rows]).any():
            return None
        if (starts >= ends).all():
            return positions + np.repeat(self.shifts[rows], lengths)
        rope = np.tile(positions, (3, 1))
        columns = (rows, starts, lengths, np.cumsum(lengths) - lengths)
        for row, start, length, offset in zip(*(each.tolist() for each in columns), strict=True):
            if self._ends[row]:
                turned = rope_positions(self.images[row].spans, start, start + length)
                rope[:, offset : offset + length] = turned
        return rope

    def step(
        self, req_ids: Sequence[str], rows: Ints, starts: Ints, lengths: Ints, given: Mapping[str, list[EmbedsSpan]]
    ) -> StepMedia:
        """Place the rows that came with a step, as :meth:`rope` describes it. ``given``: by request, in order of
        position, cut to what the step computes. Raises ``AssertionError`` if it computes a token of an image without
        its row, or only a part of an image whose tokens see each other."""
        embeds, limits = list[TokenRows](), list[tuple[int, int, int]]()
        columns = (rows, starts, lengths, np.cumsum(lengths) - lengths)
        for req_id, row, start, length, offset in zip(req_ids, *(each.tolist() for each in columns), strict=True):
            images = self.images.get(row)
            if images is None or start >= images.end:
                continue
            missing, end, to_step = 0, start + length, offset - start
            for span in images.spans:
                first, last = max(span.position, start), min(span.end, end)
                if first < last:
                    missing += last - first
                    if span.is_whole:
                        assert last == span.end, f"{req_id}: a chunk ends at {end}, inside an image up to {span.end}"
                        limits.append((first + to_step, last + to_step, last - 1))
            for position, part in map(_parts, given.get(req_id, ())):
                assert start <= position <= end - len(part), f"{req_id}: rows of tokens beyond {start} to {end}"
                missing -= len(part)
                embeds.append(TokenRows(position + to_step, part))
            assert not missing, f"{req_id}: {missing} tokens of images from position {start} on have no rows"
        return StepMedia(embeds, _last_seen(limits, starts, lengths) if limits else None)


class CrossRows:
    """Maps rows of the input batch to the blocks with the keys and values of what stands beside their prompts."""

    def __init__(self, max_num_seqs: int, num_blocks: int) -> None:
        """``num_blocks``: those of each request."""
        self._tables = np.zeros((max_num_seqs, num_blocks), dtype=np.int32)

    def take(self, block_ids: Mapping[str, list[int]], row_of: Mapping[str, int]) -> None:
        """Note the blocks of requests that begin or resume."""
        for req_id, blocks in block_ids.items():
            self._tables[row_of[req_id]] = blocks

    def step(
        self,
        req_ids: Sequence[str],
        rows: Ints,
        given: Mapping[str, list[EmbedsSpan]],
        aligned: Collection[int] = (),
    ) -> StepCross:
        """Return what the requests of a step, in these rows of the batch, have beside their prompts. ``given``: the
        rows that came with the step, by request. ``aligned``: rows of the batch whose requests ask when tokens are
        spoken."""
        written = [
            WrittenRows(index, span.rows) for index, req_id in enumerate(req_ids) for span in given.get(req_id, ())
        ]
        attended: dict[int, list[Tensor]] = {}
        if aligned:
            attended = {index: [] for index, row in enumerate(rows.tolist()) if row in aligned}
        return StepCross(self._tables[rows], written, attended)


def _parts(span: EmbedsSpan) -> tuple[int, npt.NDArray[np.float32]]:
    return span.position, span.rows


def _last_seen(limits: Sequence[tuple[int, int, int]], starts: Ints, lengths: Ints) -> Ints:
    """Return for each token of a step the last position that it sees. ``limits``: (begin, end, position) of tokens of
    the step that see more than those up to their own."""
    offsets = np.cumsum(lengths) - lengths
    seen: Ints = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
    for begin, end, position in limits:
        seen[begin:end] = position
    return seen
