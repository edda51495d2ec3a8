"""Draws the tokens of a step and appends them to the batch with one call of a kernel."""

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import DrawArgs, load_draw
from ..kernels.threads import kernel_threads
from .members import Members

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class Drawer:
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

    def append(self, members: Members, places: Ints, logits: Tensor) -> Ints | None:
        """Draw a token for each of the requests ``places`` [n] of a step from logits [n, vocab] of the host, as
        :meth:`~..sampler.sampler.Sampler.sample` does, and append it to its row; a full row keeps its tokens.

        Returns the tokens [n], which hold until the next call; None: one of the logits is NaN or a largest one is
        infinite, and nothing was appended. Raises ``AssertionError`` for places or rows that are not there.
        """
        # numpy draws such a step. The kernel is for the usual one: 32 greedy rows take 102 µs with it and took 177,
        # because numpy's code is cold after the weights have passed through the caches.
        if logits.dtype is not torch.float32 or logits.stride(1) != 1:
            return None
        args, (count, args.vocab) = self._args, logits.shape
        assert len(places) == count, f"{len(places)} tokens are to be drawn from {count} rows of logits"
        args.rows, args.params = members.rows_at, members.draws_at
        args.places, args.num_drawn = places.ctypes.data, count
        args.logits, args.logits_stride = logits.data_ptr(), logits.stride(0)
        args.num_requests, args.num_threads = len(members.rows), kernel_threads()
        appended = self._append(self._where)
        assert appended >= 0, f"tokens for places {places} of {len(members.rows)} requests: one is not there"
        return self._drawn[:count] if appended else None


def make_drawer(tokens: Int32s, known: Ints, prompts: Ints) -> Drawer | None:
    """Return what draws the tokens of a batch; None: numpy does."""
    try:
        return Drawer(tokens, known, prompts)
    except KernelsUnavailable:
        return None
