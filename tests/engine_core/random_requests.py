"""Random requests for an engine core that computes by the hash worker, and what their clients must receive."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from tests.engine_core.helpers import VOCAB_SIZE
from tokenloom.engine_core.data.messages import FinishReason, SessionTurn
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens

MAX_MODEL_LEN = 48


class StepLostError(Exception):
    """A worker failed in the middle of a step."""


class Mortal:
    """Lets a worker fail on demand after it wrote the step; it then has no state."""

    def __init__(self, worker: HashWorker) -> None:
        self.dies = False
        self.worker = worker
        self._execute = worker.execute_model
        worker.execute_model = self.execute_model  # type: ignore[method-assign]

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._execute(scheduler_output)
        if self.dies:
            self.dies = False
            self.worker._rows.clear()
            self.worker.wake_up(["kv_cache"])
            raise StepLostError


@dataclass
class Expected:
    """Holds what a client must receive for one request."""

    tokens: list[int]
    reason: FinishReason
    received: list[int] = field(default_factory=list)
    may_abort: bool = False
    """Whether a pause may have ended it, unless it ended in the step before."""


def expect(
    prompt: list[int],
    max_tokens: int,
    stop: tuple[int, ...],
    state_chunk: int = 0,
    beside: npt.NDArray[np.float32] | None = None,
) -> Expected:
    """``beside``: the rows that stand beside the prompt."""
    num_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
    tokens = expected_tokens(prompt, num_tokens, VOCAB_SIZE, state_chunk=state_chunk, beside=beside)
    for count, token_id in enumerate(tokens, 1):
        if token_id in stop:
            return Expected(tokens[:count], FinishReason.STOP)
    return Expected(tokens, FinishReason.LENGTH)


@dataclass
class Arrival:
    """Describes a request whose prompt starts with ``shared`` tokens that are equal in all requests."""

    shared: int
    tail: list[int]
    max_tokens: int
    num_accepted: int
    stop: tuple[int, ...]
    salt: bytes
    priority: int
    session: SessionTurn | None


ARRIVALS = st.builds(
    Arrival,
    shared=st.sampled_from([0, 8, 16, 20, 32]),
    tail=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    max_tokens=st.integers(1, 40),
    num_accepted=st.sampled_from([0, 0, 3, 8]),
    stop=st.sampled_from([(), (), (1,), tuple(range(0, VOCAB_SIZE, 9))]),
    salt=st.sampled_from([b"", b"", b"tenant"]),
    priority=st.integers(-1, 2),
    session=st.sampled_from(
        [None, None, SessionTurn(1, 0), SessionTurn(2, 1_000_000), SessionTurn(3, 10**12), SessionTurn(4, 0, 10**9)]
    ),
)
