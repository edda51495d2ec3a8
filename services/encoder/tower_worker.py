"""Computes the tower, in a process of its own: ``python -m tokenloom.services.encoder.tower_worker``.

It exchanges msgpack over its pipe: first ``TowerSetup``, answered by ``TowerReady``, then one ``TowerReply`` for each
``TowerJob``. It reads pixels from the slots, and writes rows to memory that the service has too.
"""

import logging
import os
from pathlib import Path

import msgspec
import numpy as np

from tokenloom.process import helper_pipe

from .pixel_slots import PixelPart, read_pixels, write_all

log = logging.getLogger(__name__)


class TowerSetup(msgspec.Struct, frozen=True):
    """Says which tower to load; the first message. ``rows``: the descriptor of the memory for rows."""

    path: str
    dtype: str
    device: str
    threads: int
    rows: int


class TowerReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says what the rows are, or why the tower is not loaded."""

    refused: str = ""
    width: int = 0
    is_bfloat16: bool = False


class TowerJob(msgspec.Struct, frozen=True):
    """Names the pixels of one image. ``slot``: the descriptor of their memory."""

    slot: int
    parts: list[PixelPart]


class TowerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how many rows were written, or why the image has none."""

    num_rows: int = 0
    refused: str = ""
    is_full: bool = False
    """Whether the device had no memory for it."""


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    if (first := helper_pipe.read_message()) is None:
        return
    setup = msgspec.msgpack.decode(first, type=TowerSetup)
    from tokenloom.gpu_worker.towers.tower import Tower  # here: with torch, which the service has not

    try:
        tower = Tower(Path(setup.path), setup.dtype, setup.device, setup.threads)
    except (ValueError, OSError, RuntimeError) as error:
        helper_pipe.write_message(msgspec.msgpack.encode(TowerReady(refused=str(error))))
        return
    helper_pipe.write_message(msgspec.msgpack.encode(TowerReady("", tower.width, tower.is_bfloat16)))
    while (message := helper_pipe.read_message()) is not None:
        job = msgspec.msgpack.decode(message, type=TowerJob)
        try:
            reply = TowerReply(_write(setup.rows, tower.rows(read_pixels(job.slot, job.parts)), tower.is_bfloat16))
        except MemoryError:
            reply = TowerReply(is_full=True)
        except ValueError as error:
            reply = TowerReply(refused=str(error))
        helper_pipe.write_message(msgspec.msgpack.encode(reply))


def _write(descriptor: int, rows: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", is_bfloat16: bool) -> int:
    # The rows of a bfloat16 tower are such numbers: the lower halves are zeros.
    values = (rows.view(np.uint32) >> 16).astype(np.uint16) if is_bfloat16 else rows
    os.ftruncate(descriptor, 0)
    write_all(descriptor, memoryview(np.ascontiguousarray(values).data).cast("B"), 0)
    return len(rows)


if __name__ == "__main__":
    main()
