"""Appends the tokens of the largest logits to the batch with one call of a kernel."""

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import BestArgs, load_batch
from ..kernels.threads import kernel_threads

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class BestTokens:
    """Belongs to a batch, whose arrays never move."""

    def __init__(self, tokens: Int32s, known: Ints) -> None:
        """The arguments are the batch's token ids, and how many of each row are known.

        Raises :class:`KernelsUnavailable`.
        """
        self._append = load_batch().append_best
        self._best = np.empty(len(tokens), dtype=np.int64)
        self._arrays = (tokens, known)  # kept: the kernel writes to them
        self._args = BestArgs(
            tokens=tokens.ctypes.data,
            known=known.ctypes.data,
            best=self._best.ctypes.data,
            tokens_stride=tokens.shape[1],
        )
        self._where = byref(self._args)

    def append(self, rows_at: int, logits: Tensor) -> Ints | None:
        """Append the token of the largest logit to each of the rows [n], the first of equal ones; a full row keeps its
        tokens.

        ``rows_at`` is the address of the rows, ``logits`` [n, vocab] are on the host. Returns the tokens [n], which
        hold until the next call; None: one of the logits is NaN or a largest one is infinite, and nothing was appended.
        """
        if logits.dtype is not torch.float32 or logits.stride(1) != 1:
            return None
        args, (count, args.vocab) = self._args, logits.shape
        args.rows, args.num_requests = rows_at, count
        args.logits, args.logits_stride = logits.data_ptr(), logits.stride(0)
        args.num_threads = kernel_threads()
        return self._best[:count] if self._append(self._where) else None


def make_best_tokens(tokens: Int32s, known: Ints) -> BestTokens | None:
    """Return what appends tokens to a batch; None: numpy finds them."""
    try:
        return BestTokens(tokens, known)
    except KernelsUnavailable:
        return None
