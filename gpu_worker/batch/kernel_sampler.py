"""Draws the tokens of a step and appends them to the batch with one call of a kernel."""

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import DrawArgs, load_draw
from ..kernels.threads import kernel_threads
from .step_arrays import StepRows

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class KernelSampler:
    """Belongs to a batch, whose arrays never move."""

    def __init__(self, tokens: Int32s, known: Ints, prompts: Ints) -> None:
        """The arguments are the batch's token ids, how many of each row are known, and how many are its prompt.

        Raises :class:`KernelsUnavailable`.
        """
        self._append = load_draw().append_drawn
        self._drawn = np.empty(len(tokens), dtype=np.int64)
        self._arrays = (tokens, known, prompts)  # kept: the kernel uses them
        self._args = DrawArgs(
            *(each.ctypes.data for each in self._arrays),
            drawn=self._drawn.ctypes.data,
            tokens_stride=tokens.shape[1],
            num_rows=len(tokens),
            most_drawn=len(tokens),
        )
        self._where = byref(self._args)
        # What the last call had; kept, because the arguments point to it.
        self._members: StepRows | None = None
        self._places = self._found = self._drawn[:0]
        self._layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def append(self, members: StepRows, places: Ints, logits: Tensor) -> Ints | None:
        """Draw a token for each of the requests ``places`` [n] of a step from logits [n, vocab] of the host, as
        :meth:`~..sampler.sampler.Sampler.sample` does, and append it to its row; a full row keeps its tokens.

        Returns the tokens [n], which hold until the next call; None: one of the logits is NaN or a largest one is
        infinite, and nothing was appended. Raises ``AssertionError`` for places or rows that are not there.
        """
        # numpy draws such a step. The kernel is for the usual one: 32 greedy rows take 102 µs with it and took 177,
        # because numpy's code is cold after the weights have passed through the caches.
        layout = logits.shape, logits.stride()
        if logits.dtype is not torch.float32 or layout[1][1] != 1:
            return None
        # The arguments stay while the same requests decode, as the gatherer's do.
        if members is not self._members or places is not self._places or layout != self._layout:
            self._point_to(members, places, layout)
        args = self._args
        args.logits, args.num_threads = logits.data_ptr(), kernel_threads()
        appended = self._append(self._where)
        assert appended >= 0, f"tokens for places {places} of {len(members.rows)} requests: one is not there"
        return self._found if appended else None

    def _point_to(self, members: StepRows, places: Ints, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """Let the next calls draw for these places of a step, from logits of this shape and these strides."""
        args, ((count, vocab), (stride, _)) = self._args, layout
        assert len(places) == count, f"{len(places)} tokens are to be drawn from {count} rows of logits"
        self._layout = None  # until all of them are written
        args.rows, args.params, args.num_requests = members.rows_at, members.draws_at, len(members.rows)
        args.places, args.num_drawn = places.ctypes.data, count
        args.vocab, args.logits_stride = vocab, stride
        self._members, self._places, self._found, self._layout = members, places, self._drawn[:count], layout


def make_kernel_sampler(tokens: Int32s, known: Ints, prompts: Ints) -> KernelSampler | None:
    """Return what draws the tokens of a batch; None: numpy does."""
    try:
        return KernelSampler(tokens, known, prompts)
    except KernelsUnavailable:
        return None
