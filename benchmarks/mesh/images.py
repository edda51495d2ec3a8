"""``python -m tokenloom.bench.mesh.images PART MODEL``: what images cost a mesh whose model reads them, and long sounds
one that transcribes.

- ``first-token``: a new image of 1024 x 1024 pixels against its parts (decoding with the processor, the tower, and the
  prefill of as many tokens of text), and a second turn over it, with the rows that encoders computed, the bytes of
  rows that came to the engine and the bytes of files that came to encoders meanwhile.
- ``texts``: tokens a second of streams of text, alone and beside new images in turns; the worker waits in place
  of a model (``--worker timed``), so that images and texts share only the mesh, and the encoder has a core of its own.
- ``memory``: how much the gateway and the tokenizer grow with 32 images of 4 MB at once, and whether they load torch.
- ``sound``: how much each part grows, and how large the gateway's files become, while an hour of sound is transcribed.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..chaos.clients.http_request import send
from ..chaos.clients.media import RATE, png, wav
from ..chaos.clients.upload_clients import FORM, form_of
from ..report import machine
from .local_mesh import MeshBroke, pids_by_service, with_mesh
from .observer import metrics_page

T = TypeVar("T")
SIDE = 1024
"""Pixels of the images whose first token is measured."""
LARGE_SIDE = 1180
"""Pixels of an image of random pixels whose file has 4 MB."""
NUM_LARGE = 32
NUM_STREAMS = 16
"""Texts at once."""
_ROUNDS = 10
_SAMPLE_SECONDS = 0.02
_COUNTERS = ("encoder_rows_total", "rows_bytes_received_total", "encoder_put_bytes_total")
_SUMS = ("encoder_decode_seconds_sum", "encoder_tower_seconds_sum")
_WORD = "word "


def drawn(side: int, seed: int, fields: int = 0) -> str:
    """Return a ``data:`` URL of ``side`` x ``side`` random pixels; with ``fields``, of so many squares of a colour."""
    numbers = np.random.default_rng(seed)
    size = fields or side
    pixels = numbers.integers(0, 256, (size, size, 3), dtype=np.uint8)
    if fields:
        pixels = pixels.repeat(side // fields, axis=0).repeat(side // fields, axis=1)
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


class ImageLoad:
    """Sends chats to a mesh's gateway and reads the metrics of its parts."""

    def __init__(self, mesh: Mesh, model: str) -> None:
        self._mesh = mesh
        self._model = model
        address = mesh.gateways[0].http
        assert address is not None
        self._address = address

    async def answer_of(self, messages: Sequence[Any], length: int = 1) -> tuple[float, int]:
        """Return the seconds until the whole answer of ``length`` tokens, and the tokens of the prompt."""
        body = {"model": self._model, "messages": messages, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        async with send("POST", self._address, "/v1/chat/completions", json.dumps(body).encode()) as response:
            answer = await response.body()
        if response.status != 200:
            raise MeshBroke(f"{response.status}: {answer[:300].decode(errors='replace')}")
        return time.perf_counter() - began, json.loads(answer)["usage"]["prompt_tokens"]

    async def transcript_of(self, file: bytes) -> tuple[float, int]:
        """Return the seconds of a sound that were heard, and the bytes of its text."""
        fields = {"model": self._model, "response_format": "verbose_json"}
        body = form_of(fields, "sound.wav", file)
        async with send("POST", self._address, "/v1/audio/transcriptions", body, FORM) as response:
            answer = await response.body()
        if response.status != 200:
            raise MeshBroke(f"{response.status}: {answer[:300].decode(errors='replace')}")
        heard = json.loads(answer)
        return heard["duration"], len(heard["text"].encode())

    async def counted(self) -> dict[str, float]:
        """Return the sum of each metric over the parts."""
        found = dict.fromkeys((*_COUNTERS, *_SUMS), 0.0)
        for part in self._mesh.parts:
            if part.state is None or not part.state.metrics:
                continue
            page = await metrics_page(part.state.metrics)
            for name in found:
                values = re.findall(rf"^tokenloom_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
                found[name] += sum(map(float, values))
        return found


def turn(urls: Sequence[str], text: str) -> dict[str, Any]:
    """Return a user's turn of images and a text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def measure_first_tokens(load: ImageLoad) -> dict[str, float]:
    """Return medians in ms, and what a second turn over each image moved."""
    await load.answer_of([turn([drawn(SIDE, 10_000, 16)], "warm up")])
    before = await load.counted()
    images = [drawn(SIDE, seed, 16) for seed in range(_ROUNDS)]
    seconds, tokens = [], 0
    for number, image in enumerate(images):
        taken, tokens = await load.answer_of([turn([image], f"{number} What?")])
        seconds.append(taken)
    between = await load.counted()
    answered = {"role": "assistant", "content": "Squares."}
    again = []
    for number, image in enumerate(images):
        turns = [turn([image], f"{number} What?"), answered, {"role": "user", "content": "And now?"}]
        again.append((await load.answer_of(turns))[0])
    after = await load.counted()
    _, least = await load.answer_of([turn([], "0")])
    texts = [(await load.answer_of([turn([], f"{number}{'x' * (tokens - least)}")]))[0] for number in range(_ROUNDS)]
    parts = {name.removesuffix("_sum"): (between[name] - before[name]) / _ROUNDS * 1e3 for name in _SUMS}
    return {
        "prompt_tokens": tokens,
        "new_image_ms": statistics.median(seconds) * 1e3,
        **{f"{name.removesuffix('_seconds')}_ms": value for name, value in parts.items()},
        "text_of_as_many_tokens_ms": statistics.median(texts) * 1e3,
        "second_turn_ms": statistics.median(again) * 1e3,
        **{f"second_turns_{name}": after[name] - between[name] for name in _COUNTERS},
    }


async def measure_memory(load: ImageLoad, mesh: Mesh) -> dict[str, Any]:
    """Return what gateway and tokenizer grow by, at the most while the large images are on their way, in MiB."""
    images = [drawn(LARGE_SIDE, seed) for seed in range(NUM_LARGE)]
    growth = MemoryGrowth(mesh, ("gateway", "tokenizer"))
    await growth.during(asyncio.gather(*(load.answer_of([turn([image], "What?")]) for image in images)))
    return {"files_mib": sum(len(image) for image in images) * 3 / 4 / 2**20, **growth.report()}


async def measure_sound(load: ImageLoad, mesh: Mesh, minutes: float) -> dict[str, Any]:
    """Return what each part grows by while so many minutes of sound are transcribed, in MiB."""
    numbers = np.random.default_rng(1)
    file = wav((3000 * numbers.standard_normal(round(60 * minutes * RATE))).astype("<i2"))
    growth = MemoryGrowth(mesh, ("gateway", "tokenizer", "output_processor", "encoder", "engine"), every=0.2)
    began = time.perf_counter()
    seconds, size = await growth.during(load.transcript_of(file))
    return {
        "files_mib": len(file) / 2**20,
        "sound_seconds": seconds,
        "text_bytes": size,
        "seconds": time.perf_counter() - began,
        **growth.report(),
    }


class MemoryGrowth:
    """Watches the memory of some parts with all their processes, and the files without names that they have open."""

    def __init__(self, mesh: Mesh, services: Sequence[str], every: float = _SAMPLE_SECONDS) -> None:
        """``every``: seconds between two looks."""
        self._every = every
        found = pids_by_service(mesh)
        self._parts = {name: [each for pid in found[name] for each in _with_children(pid)] for name in services}
        self._before = {name: _resident(parts) for name, parts in self._parts.items()}
        self._peak, self._files = dict(self._before), dict.fromkeys(services, 0)

    async def during(self, work: Awaitable[T]) -> T:
        """Watch until ``work`` ends, and return its result."""
        running = asyncio.ensure_future(work)
        while not running.done():
            self.look()
            await asyncio.wait([running], timeout=self._every)
        return running.result()

    def look(self) -> None:
        """Take what is held now into account."""
        for name, parts in self._parts.items():
            self._peak[name] = max(self._peak[name], _resident(parts))
            self._files[name] = max(self._files[name], _unnamed_bytes(parts))

    def report(self) -> dict[str, Any]:
        """Return MiB by service, and the services that have loaded torch."""
        return {
            "before_mib": {name: value / 2**20 for name, value in self._before.items()},
            "growth_mib": {name: (self._peak[name] - value) / 2**20 for name, value in self._before.items()},
            "unnamed_files_mib": {name: value / 2**20 for name, value in self._files.items() if value},
            "with_torch": [name for name, parts in self._parts.items() if any(map(_has_torch, parts))],
        }


def _with_children(pid: int) -> list[psutil.Process]:
    part = psutil.Process(pid)
    return [part, *part.children(recursive=True)]


def _resident(parts: Sequence[psutil.Process]) -> int:
    size = 0
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has been replaced
            size += part.memory_info().rss
    return size


def _unnamed_bytes(parts: Sequence[psutil.Process]) -> int:
    """Return the bytes of the files on disks that were removed while they are open."""
    sizes = {}
    for part in parts:
        for link in Path(f"/proc/{part.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(link)
                if name.endswith("(deleted)") and not name.startswith(("/memfd:", "/dev/shm/")):
                    found = link.stat()
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _has_torch(part: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{part.pid}/maps").read_text()
    return False


async def measure_texts(load: ImageLoad, seconds: float, rate: float, turns: int) -> dict[str, Any]:
    """Return tokens a second of texts, alone and beside ``rate`` new images a second, in turns A B B A."""
    found: dict[bool, list[float]] = {False: [], True: []}
    seed = 20_000
    images = [drawn(SIDE, seed + number, 16) for number in range(int(seconds * rate * turns) + turns)]
    await _texts(load, min(seconds, 2.0))
    for number in range(2 * turns):
        with_images = number % 4 in (1, 2)
        beside = asyncio.create_task(_send_images(load, images, rate)) if with_images else None
        found[with_images].append(await _texts(load, seconds))
        if beside is not None:
            beside.cancel()
            await asyncio.wait([beside])
    alone, mixed = (statistics.mean(found[with_images]) for with_images in (False, True))
    return {
        "alone_tokens_s": alone,
        "beside_images_tokens_s": mixed,
        "share": mixed / alone,
        "turns": list(found.values()),
    }


async def _texts(load: ImageLoad, seconds: float, length: int = 32) -> float:
    end, tokens, began = time.perf_counter() + seconds, 0, time.perf_counter()

    async def stream(number: int) -> None:
        nonlocal tokens
        while time.perf_counter() < end:
            await load.answer_of([turn([], f"{number} {_WORD * 8}")], length)
            tokens += length

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(stream(number))
    return tokens / (time.perf_counter() - began)


async def _send_images(load: ImageLoad, images: list[str], rate: float) -> None:
    async with asyncio.TaskGroup() as group:
        while images:
            group.create_task(load.answer_of([turn([images.pop()], "What?")], 8))
            await asyncio.sleep(1 / rate)


def separate(mesh: Mesh) -> dict[str, list[int]]:
    """Give the last core to encoders, with their decoders and tower, and the others to all other parts and to the
    clients. Returns the cores; empty on a machine with one."""
    *rest, last = sorted(os.sched_getaffinity(0))
    if not rest:
        return {}
    _pin([psutil.Process()], rest)
    for service, pids in pids_by_service(mesh).items():
        for part in map(psutil.Process, pids):
            _pin([part, *part.children(recursive=True)], [last] if service == "encoder" else rest)
    return {"encoder": [last], "rest": rest}


def _pin(processes: Sequence[psutil.Process], cores: list[int]) -> None:
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores)


def mesh_options(model: Path, *engine: str) -> MeshOptions:
    """Describe a mesh of one part of each kind."""
    flags = {"engine": ("--max-num-seqs", "64", *engine)}
    return MeshOptions(model=model, served_model_name="m", port=0, flags=flags, common_flags=("--log-level", "warning"))


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for and return the report."""
    report: dict[str, Any] = {"machine": machine.describe()}

    async def work(mesh: Mesh) -> None:
        load = ImageLoad(mesh, "m")
        match arguments.part:
            case "first-token":
                report["first_token"] = await measure_first_tokens(load)
            case "memory":
                report["memory"] = await measure_memory(load, mesh)
            case "sound":
                report["sound"] = await measure_sound(load, mesh, arguments.minutes)
            case _:
                report["cores"] = separate(mesh)
                report["texts"] = await measure_texts(load, arguments.seconds, arguments.rate, arguments.turns)
                report["load"] = os.getloadavg()[0]

    timed = ("--worker", "timed", "--hash-step-seconds", str(arguments.step_ms / 1e3))
    await with_mesh(mesh_options(arguments.model, *(timed if arguments.part == "texts" else ())), work)
    return report


def main() -> None:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("first-token", "texts", "memory", "sound"))
    parser.add_argument("model", type=Path, help="A model's folder.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Length of a turn with texts.")
    parser.add_argument("--turns", type=int, default=4, help="Turns alone, and as many beside images.")
    parser.add_argument("--rate", type=float, default=2.0, help="New images a second beside texts.")
    parser.add_argument("--minutes", type=float, default=62.0, help="Length of the sound.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Length of a step of the worker that waits.")
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
