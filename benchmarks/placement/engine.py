"""Simulates an engine with continuous batching and a prefix cache, and the requests that it computes."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.services.engine.records.load import QueueRates, StepRates
from tokenloom.v1.coordinator_pb2 import EngineReport, EngineState
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BLOCK, KV_BLOCKS, SEATS, BUDGET = 256, 1500, 128, 2048
STEP_SECONDS, SECONDS_PER_REQUEST, SECONDS_PER_TOKEN = 0.006, 0.00005, 0.00003
REPORT_SECONDS, NET_SECONDS, SCRAPE_SECONDS = 0.03, 0.001, 0.05
FINGERPRINT = Fingerprint(model="m", weights=b"w", tokenizer=b"t", block_size=BLOCK, kv_layout="l", numerics="n")


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. ``prefix``: hashes of the blocks that it shares with others. Times are seconds."""

    at: float
    prefix: Sequence[int]
    prompt: int
    output: int
    left: int = 0
    cached: int = 0
    ttft: float = 60.0
    pick: PickId | None = None

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK)


class Engine:
    """Runs steps of chunked prefills and decodes, first come, first served."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.free = KV_BLOCKS
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[tuple[int, int, Request]] = []  # a heap by the step that ends each
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.arrived: list[PickId] = []
        self.evicted: list[int] = []  # since the last report
        self.step = 0
        self.is_busy = self.is_reporting = False
        self.reported_at = 0.0
        self._num_prefilled = self._prefilled_tokens = self._computed_tokens = 0
        self._queue_rates, self._step_rates = QueueRates(SEATS), StepRates()

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def requests(self) -> int:
        return len(self.waiting) + self.running

    def tokens_to_compute(self) -> int:
        """Return what is left of the prompts that run, and of those that wait without what is cached now."""
        waiting = sum(each.prompt - BLOCK * self.cached_blocks(each.prefix) for each in self.waiting)
        return waiting + sum(each.left for each in self.prefilling)

    def cached_blocks(self, prefix: Sequence[int]) -> int:
        return next((index for index, each in enumerate(prefix) if each not in self.cache), len(prefix))

    def begin_step(self) -> float:
        """Give the prompts that run, then those that wait, the step's budget; return its seconds."""
        budget = BUDGET - len(self.decoding)
        for request in self.prefilling:
            budget -= self._compute(request, budget)
        while budget and self.waiting and self.running < SEATS and self.free >= self.waiting[0].blocks:
            request = self.waiting.popleft()
            self.free -= request.blocks
            request.cached = min(self.cached_blocks(request.prefix) * BLOCK, request.prompt - 1)
            request.left = request.prompt - request.cached
            self.prefilling.append(request)
            budget -= self._compute(request, budget)
        num_tokens = BUDGET - len(self.decoding) - budget
        self._computed_tokens += num_tokens + len(self.decoding)
        return STEP_SECONDS + SECONDS_PER_REQUEST * self.running + SECONDS_PER_TOKEN * num_tokens

    def end_step(self, now: float) -> None:
        """Give the requests of the step their tokens."""
        self.step += 1
        while self.decoding and self.decoding[0][0] <= self.step:
            self.free += heapq.heappop(self.decoding)[2].blocks
        while self.prefilling and not self.prefilling[0].left:
            request = self.prefilling.pop(0)
            request.ttft = now - request.at
            self._num_prefilled += 1
            self._prefilled_tokens += request.prompt
            heapq.heappush(self.decoding, (self.step + request.output - 1, id(request), request))
        stats = SchedulerStats(
            num_waiting=len(self.waiting),
            num_running=self.running,
            kv_usage=1 - self.free / KV_BLOCKS,
            num_prefilled_requests=self._num_prefilled,
            num_prefilled_tokens=self._prefilled_tokens,
            num_computed_tokens=self._computed_tokens,
        )
        self._queue_rates.observe(stats, now)
        self._step_rates.observe(stats, self.step, now)

    def report(self) -> EngineReport:
        """Return what the engine reports to the coordinator."""
        picks, self.arrived = self.arrived, []
        return EngineReport(
            role=EngineRole.ENGINE_ROLE_BOTH,
            state=EngineState.ENGINE_STATE_SERVING,
            waiting=len(self.waiting),
            running=self.running,
            waiting_tokens=sum(each.prompt for each in self.waiting),
            kv_usage=1 - self.free / KV_BLOCKS,
            free_kv_blocks=self.free,
            picks_arrived=picks,
            step=self.step,
            seats=self._queue_rates.seats,
            prefill_tokens_per_second=self._queue_rates.prefill_tokens_per_second,
            computed_tokens_per_second=self._step_rates.computed_tokens_per_second,
            prefilling_tokens=sum(each.left for each in self.prefilling),
            step_seconds=self._step_rates.step_seconds,
        )

    def _compute(self, request: Request, budget: int) -> int:
        """Compute a part of a prompt and return its tokens. Its full blocks can be found from then on."""
        num_tokens = min(budget, request.left)
        request.left -= num_tokens
        self._remember(request.prefix[: (request.prompt - request.left) // BLOCK])
        return num_tokens

    def _remember(self, prefix: Sequence[int]) -> None:
        for each in reversed(prefix):
            self.cache[each] = None
            self.cache.move_to_end(each)
        while len(self.cache) > KV_BLOCKS * 0.6:  # the rest belongs to the requests that run
            self.evicted.append(self.cache.popitem(last=False)[0])
