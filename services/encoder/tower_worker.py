"""Computes the tower, in a process of its own: ``python -m tokenloom.services.encoder.tower_worker``.

It exchanges msgpack over its pipe: first ``TowerSetup``, answered by ``TowerReady``, then one ``TowerReply`` for each
``TowerJob``. It reads pixels from the slots, and writes rows to memory that the service has too.
"""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenloom.process import helper_pipe

from .pixel_slots import PixelPart, read_pixels, write_all

log = logging.getLogger(__name__)

GPU_BATCH = 8
"""Pieces of 30 s that a GPU computes at once. On CPUs one at a time is as fast, and its rows depend on no other."""


class TowerSetup(msgspec.Struct, frozen=True):
    """Says which tower to load; the first message. ``rows``: the descriptor of the memory for rows."""

    path: str
    dtype: str
    device: str
    threads: int
    rows: int
    hears: bool = False
    """Whether it is a tower of sounds."""
    batch: int = 0
    """Pieces of sound, or images of one size, that are computed at once; 0: one image, and as many pieces as pay off on
    the device."""
    quantization: str = ""
    """How the linear layers are rounded; empty: they are not."""
    has_graphs: bool = False
    """Whether images of sizes that came before are computed from graphs of a GPU."""


class TowerReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says what the rows are, or why the tower is not loaded."""

    refused: str = ""
    width: int = 0
    is_bfloat16: bool = False
    most: int = 1
    """Inputs that are computed at once."""


class TowerInput(msgspec.Struct, frozen=True):
    """Names the pixels of one image, or the features of a piece of sound. ``slot``: the descriptor of their memory."""

    slot: int
    parts: list[PixelPart]


class TowerJob(msgspec.Struct, frozen=True):
    """Asks for the rows of all of these."""

    inputs: list[TowerInput]


class TowerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how many rows of each input were written, one behind the other, or why there are none of any."""

    num_rows: list[int] = []
    refused: str = ""
    is_full: bool = False
    """Whether the device had no memory for them."""


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    if (first := helper_pipe.read_message()) is None:
        return
    setup = msgspec.msgpack.decode(first, type=TowerSetup)
    try:
        tower = _load(setup)
    except (ValueError, OSError, RuntimeError) as error:
        helper_pipe.write_message(msgspec.msgpack.encode(TowerReady(refused=str(error))))
        return
    helper_pipe.write_message(
        msgspec.msgpack.encode(TowerReady("", tower.width, tower.is_bfloat16, _most(tower, setup)))
    )
    while (message := helper_pipe.read_message()) is not None:
        job = msgspec.msgpack.decode(message, type=TowerJob)
        try:
            rows = tower.rows_of([read_pixels(each.slot, each.parts) for each in job.inputs])
            reply = TowerReply(_write(setup.rows, rows, tower.is_bfloat16))
        except MemoryError:
            reply = TowerReply(is_full=True)
        except ValueError as error:
            reply = TowerReply(refused=str(error))
        helper_pipe.write_message(msgspec.msgpack.encode(reply))


def _load(setup: TowerSetup) -> Any:
    # Here: with torch, which the service has not.
    from tokenloom.gpu_worker.towers import sound_tower, tower

    common = (Path(setup.path), setup.dtype, setup.device, setup.threads, setup.quantization)
    if not setup.hears:
        return tower.Tower(*common, has_graphs=setup.has_graphs)
    if setup.has_graphs:
        raise ValueError("towers of sounds have no graphs; leave tower_graphs out")
    return sound_tower.SoundTower(*common)


def _most(tower: Any, setup: TowerSetup) -> int:
    return setup.batch or (GPU_BATCH if setup.hears and tower.device.startswith("cuda") else 1)


def _write(
    descriptor: int, rows: "list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]", is_bfloat16: bool
) -> list[int]:
    os.ftruncate(descriptor, 0)
    offset = 0
    for each in rows:
        # The rows of a bfloat16 tower are such numbers: the lower halves are zeros.
        values = (each.view(np.uint32) >> 16).astype(np.uint16) if is_bfloat16 else each
        offset = write_all(descriptor, memoryview(np.ascontiguousarray(values).data).cast("B"), offset)
    return list(map(len, rows))


if __name__ == "__main__":
    main()
