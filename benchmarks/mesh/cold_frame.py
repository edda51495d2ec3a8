"""Measures what a frame costs an output processor when its caches are warm, after a sleep, and after other data took
their place.

``python -m tokenloom.bench.mesh.cold_frame`` passes frames of an engine, from their bytes to those for the gateway,
through the code of the output processor that a token goes through: link, attempt, sample, detokenizer and outbox.
"""

import argparse
import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.output_processor.placement.engine_link import EngineAttempt, EngineLink
from tokenloom.services.output_processor.placement.engine_search import Lifetime
from tokenloom.services.output_processor.request.outbox import Outbox
from tokenloom.services.output_processor.request.request_stages import RequestStages
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import EngineFrame
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import Hello, Prompt

Input = TypeVar("Input")

_LINE_BYTES = 64
_LINES = 512
_FIRST_TOKEN, _TOKENS = 300, 700
"""Tokens of the demo model that are words."""


@dataclass(frozen=True)
class FrameCase:
    """Describes one run."""

    rows: int = 64
    tokens: int = 2
    """Of each row of a frame."""
    frames: int = 100
    sleep_ms: float = 8.0
    other_mib: int = 160
    """Data that are written to drive out all others: more than the last-level cache holds, or they drive out only what
    is in the smaller ones."""


async def run_case(case: FrameCase) -> dict[str, Any]:
    """Return, for what precedes a frame, the µs of CPU of a frame and the ns of each of :data:`_LINES` lines of memory,
    medians."""
    other = bytearray(case.other_mib << 20)
    ones = b"\1" * len(other[::_LINE_BYTES])

    def overwrite() -> None:
        other[::_LINE_BYTES] = ones

    preceding: dict[str, Callable[[], object]] = {
        "another": lambda: None,
        f"{case.sleep_ms:g} ms of sleep": lambda: time.sleep(case.sleep_ms / 1e3),
        f"{case.other_mib} MiB overwritten": overwrite,
    }
    vocabulary = Vocabulary(load_tokenizer(DEMO_MODEL))
    report: dict[str, Any] = {}
    for name, precede in preceding.items():
        outputs, lines = FrameOutputs(vocabulary, case.rows), _chain(Random(0))
        first, *frames = frames_of(case)
        outputs.pass_on(first)  # which begins them, and costs more
        frame_us = [_cpu_us(precede, outputs.pass_on, frame) for frame in frames]
        line_ns = [_cpu_us(precede, _walk, lines) / _LINES * 1e3 for _ in frames]
        report[name] = {"frame_us": round(median(frame_us), 1), "line_ns": round(median(line_ns), 1)}
    return report


class FrameOutputs:
    """Holds an output processor's end of a link to an engine, which runs a request for each row of its frames, and what
    is sent to their gateway. No I/O."""

    def __init__(self, vocabulary: Vocabulary, rows: int) -> None:
        identity = EngineIdentity(engine_id="engine", epoch=1)
        identity.limits.vocab_size = len(vocabulary.pieces)
        self._link = EngineLink(identity, Hello(), cast(Any, None), hang_seconds=10.0)
        self._outbox = Outbox(lambda: None)
        placer = cast(Any, SimpleNamespace(budget=None, is_shared=False, check=None, release=lambda attempt: None))
        for slot in range(1, rows + 1):
            submit = Submit(slot=slot, prompt=Prompt(token_ids=[5, 6, 7]))
            output = SampleOutput(submit, vocabulary, frozenset(), self._outbox)
            lifetime = Lifetime(submit, 0.0)
            params, no_tasks = submit.sampling_params, cast(Any, None)  # nothing is placed again
            stages = RequestStages(submit, params, output, placer, no_tasks, lambda *_: None, lifetime)
            stages.begin_on(EngineAttempt(self._link))

    def pass_on(self, data: bytes) -> bytes:
        """Turn an engine's frame into one for the gateway."""
        for _ in self._link.receive(EngineFrame.FromString(data)):
            pass
        return self._outbox.take().SerializeToString()


def frames_of(case: FrameCase) -> Iterator[bytes]:
    """Yield the frame of the first tokens, and those of the next ones."""
    slots = range(1, case.rows + 1)
    first = [_FIRST_TOKEN + slot for slot in slots]
    yield EngineFrame(step=1, slot=slots, token_index=[0] * case.rows, token_ids=first).SerializeToString()
    counts = [case.tokens] * case.rows if case.tokens > 1 else []
    for step in range(case.frames):
        ids = [_FIRST_TOKEN + (7 * step + at) % _TOKENS for at in range(case.rows * case.tokens)]
        indices = [1 + case.tokens * step] * case.rows
        frame = EngineFrame(step=step + 2, slot=slots, token_index=indices, num_tokens=counts, token_ids=ids)
        yield frame.SerializeToString()


def _chain(random: Random) -> "array[int]":
    """Return lines of memory of which each holds the place of the next one, in an order that no processor foresees."""
    order = [line * (_LINE_BYTES // 8) for line in range(_LINES)]
    random.shuffle(order)
    lines = array("q", bytes(_LINES * _LINE_BYTES))
    for at, place in enumerate(order):
        lines[place] = order[(at + 1) % _LINES]
    return lines


def _walk(lines: "array[int]") -> int:
    place = 0
    for _ in range(_LINES):
        place = lines[place]
    return place


def _cpu_us(precede: Callable[[], object], work: Callable[[Input], object], given: Input) -> float:
    """Return what ``work`` takes after ``precede``."""
    precede()
    started = time.process_time_ns()
    work(given)
    return (time.process_time_ns() - started) / 1e3


def main() -> None:
    """Print a line for what precedes a frame."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=FrameCase.rows)
    parser.add_argument("--tokens", type=int, default=FrameCase.tokens, help="of each row of a frame")
    parser.add_argument("--sleep-ms", type=float, default=FrameCase.sleep_ms)
    parser.add_argument("--other-mib", type=int, default=FrameCase.other_mib, help="overwritten to drive out all else")
    arguments = parser.parse_args()
    for name, figures in asyncio.run(run_case(FrameCase(**vars(arguments)))).items():
        print(f"after {name}: {json.dumps(figures)}")


if __name__ == "__main__":
    main()
