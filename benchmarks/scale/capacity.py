"""The capacity model of docs/operate/scaling.md: how many replicas of each part a number of streams needs.

The constants are measured; each names the command that prints it. ``k8s/overlays/large`` follows from :func:`cell`.
"""

from dataclasses import dataclass
from math import ceil

from tokenloom.services.coordinator.engines.engine_stream import report_interval

STREAMS_PER_ENGINE = 64
ENGINES_PER_CELL = 1000
"""What one coordinator is measured with (``tokenloom bench scale``)."""
COORDINATOR_SECONDS_PER_REPORT = 90e-6
COORDINATOR_SECONDS_PER_PICK = 230e-6
"""Processor time in the thread of the coordinator's event loop (``tokenloom bench scale``): of a report, with the
snapshots that follow from it, and of a request with 256 block hashes through ``PickStream``."""
LONGEST_REPORT_INTERVAL = 1.0
"""Seconds between two reports of an engine while the coordinator has no time for more."""
STEP_SECONDS = 0.02
"""Time between two tokens of a stream."""
GATEWAY_SECONDS_PER_TOKEN = 30e-6
OUTPUT_PROCESSOR_SECONDS_PER_TOKEN = 19e-6
"""Processor time at steps of 20 ms and 64 streams an engine (``tokenloom bench mesh --batch 64 --step-ms 20``)."""
TOKENIZER_SECONDS_PER_TOKEN = 1e-6
"""Processor time of one encoded token."""
PROMPT_TOKENS = 1000
"""Tokens of a prompt that the tokenizers of the overlay are sized for."""
UTILIZATION = 0.7
"""Share of its core that a process may use, as the autoscalers aim for: one process has one event loop."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The replicas of a mesh with one coordinator.

    Attributes:
        requests_per_second: What its coordinator can place beside all reports that it asks for.
        most_requests_per_second: What it can place when it asks for one report a second from each engine, because it
            would be late otherwise. Both are at most one request for each stream.
        seconds_per_answer: As long as an answer must take on average, at least, for all streams to be in use.
    """

    engines: int
    gateways: int
    output_processors: int
    tokenizers: int
    requests_per_second: int
    most_requests_per_second: int
    seconds_per_answer: float


def cell(engines: int = ENGINES_PER_CELL, streams_per_engine: int = STREAMS_PER_ENGINE) -> Cell:
    """Return what a mesh of so many engines needs."""
    streams = engines * streams_per_engine
    tokens_per_second = streams / STEP_SECONDS
    most_requests = _requests(engines, LONGEST_REPORT_INTERVAL, streams)
    return Cell(
        engines=engines,
        gateways=_replicas(tokens_per_second * GATEWAY_SECONDS_PER_TOKEN),
        output_processors=_replicas(tokens_per_second * OUTPUT_PROCESSOR_SECONDS_PER_TOKEN),
        tokenizers=_replicas(most_requests * PROMPT_TOKENS * TOKENIZER_SECONDS_PER_TOKEN),
        requests_per_second=_requests(engines, report_interval(engines), streams),
        most_requests_per_second=most_requests,
        seconds_per_answer=streams / most_requests,
    )


def cells(streams: int) -> int:
    """Return how many cells hold so many streams."""
    return ceil(streams / (ENGINES_PER_CELL * STREAMS_PER_ENGINE))


def _requests(engines: int, interval: float, streams: int) -> int:
    """Return how many requests a second the coordinator can place beside reports at an interval."""
    left = UTILIZATION - engines / interval * COORDINATOR_SECONDS_PER_REPORT
    return min(int(left / COORDINATOR_SECONDS_PER_PICK), streams)


def _replicas(cores: float) -> int:
    return ceil(cores / UTILIZATION)
