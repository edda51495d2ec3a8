"""The capacity model of docs/operate/scaling.md: how many replicas of each part a number of streams needs.

The constants are measured; each names the command that prints it. ``k8s/overlays/large`` follows from :func:`cell`.
"""

from dataclasses import dataclass
from math import ceil

STREAMS_PER_ENGINE = 64
ENGINES_PER_CELL = 1000
"""What one coordinator is measured with (``tokenloom bench scale``)."""
PICKS_PER_SECOND = 5000
"""Placements that one coordinator makes with 256 block hashes in each (``tokenloom bench scale``)."""
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
        requests_per_second: What its coordinator can place.
        seconds_per_answer: As long as an answer must take on average, at least, for all streams to be in use.
    """

    engines: int
    gateways: int
    output_processors: int
    tokenizers: int
    requests_per_second: int
    seconds_per_answer: float


def cell(engines: int = ENGINES_PER_CELL, streams_per_engine: int = STREAMS_PER_ENGINE) -> Cell:
    """Return what a mesh of so many engines needs."""
    streams = engines * streams_per_engine
    tokens_per_second = streams / STEP_SECONDS
    return Cell(
        engines=engines,
        gateways=_replicas(tokens_per_second * GATEWAY_SECONDS_PER_TOKEN),
        output_processors=_replicas(tokens_per_second * OUTPUT_PROCESSOR_SECONDS_PER_TOKEN),
        tokenizers=_replicas(PICKS_PER_SECOND * PROMPT_TOKENS * TOKENIZER_SECONDS_PER_TOKEN),
        requests_per_second=PICKS_PER_SECOND,
        seconds_per_answer=streams / PICKS_PER_SECOND,
    )


def cells(streams: int) -> int:
    """Return how many cells hold so many streams."""
    return ceil(streams / (ENGINES_PER_CELL * STREAMS_PER_ENGINE))


def _replicas(cores: float) -> int:
    return ceil(cores / UTILIZATION)
