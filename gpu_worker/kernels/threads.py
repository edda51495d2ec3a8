"""Sets with how many threads the kernels of this process compute, and how these threads wait."""

from ctypes import CDLL

import torch

from .compiler import KernelsUnavailable
from .library import load_pool

QUIET_SPIN = 100_000
"""In ns, for which threads wait for the next kernel before they sleep."""
SHARED_SPIN = 5_000
"""The same while other programs want the cores: who spins takes them from the program, or from itself."""
_threads = 0


def kernel_threads() -> int:
    """Return the number of threads to pass to a kernel: by default torch's."""
    return _threads or torch.get_num_threads()


def set_kernel_threads(threads: int) -> None:
    """Set that number independently of torch's; 0: torch's again."""
    global _threads
    _threads = threads


def load_sharing() -> CDLL | None:
    """Load what places threads and shares the cores; None: it cannot be built."""
    try:
        return load_pool()
    except KernelsUnavailable:
        return None


def share_cores(shared: bool, most_threads: int) -> None:
    """Choose how threads get the work of kernels.

    On a quiet machine they are OpenMP's, which torch's operations keep awake. On a ``shared`` one they are those of
    the pool, which sleep when they have nothing to do and for which
    a kernel waits only if they have begun a piece of its work.
    """
    if (pool := load_sharing()) is None:
        return  # then there are no kernels either
    pool.set_waiting(not shared, SHARED_SPIN if shared else QUIET_SPIN)
    pool.set_most_threads(most_threads)
