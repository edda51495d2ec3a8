"""A process of its own that measures how much memory a model takes beyond its weights while new ones replace them.

In the process of the tests the peak also holds what other tests' threads, slabs and heaps take meanwhile.
"""

import ctypes
import json
import sys
import threading
from pathlib import Path

from tokenloom.gpu_worker.model_slot import ModelSlot
from tokenloom.gpu_worker.models.architectures import ModelLoader
from tokenloom.process.memory import return_freed, status_bytes

QUANTIZATIONS = (None, "int8-dynamic", "int4")
_M_MMAP_THRESHOLD = -3
"""The option of ``mallopt`` for the size from which on a block is a mapping of its own (malloc.h)."""


class PeakOfAnonymousMemory:
    """Samples how much memory, apart from pages of files, this process has beyond what it had at the beginning."""

    def __enter__(self) -> "PeakOfAnonymousMemory":
        self.nbytes = 0
        self._before = status_bytes("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.0005):
            self.nbytes = max(self.nbytes, status_bytes("RssAnon") - self._before)


def main(path: Path, other: Path) -> None:
    """Print the peaks in bytes by quantization, as JSON."""
    # Otherwise glibc keeps larger and larger blocks that are freed.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    peaks = {}
    ModelSlot(path, ModelLoader()).replace(other)  # imports what is imported at first use
    for quantization in QUANTIZATIONS:
        slot = ModelSlot(path, ModelLoader(quantization=quantization))
        return_freed()
        with PeakOfAnonymousMemory() as peak:
            slot.replace(other)
        peaks[str(quantization)] = peak.nbytes
        del slot
        return_freed()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
