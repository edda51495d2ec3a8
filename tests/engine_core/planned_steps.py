"""Makes and steps a scheduler without a worker."""

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_counts, check_scheduler
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.messages import EngineCoreOutput
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.scheduling.scheduler import Scheduler


class Clock:
    """Counts calls: every reading is one nanosecond later."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_model_len: int = 100,
    caching: bool = True,
    num_stages: int = 1,
    num_state_slots: int = 0,
    state_chunk: int = 1,
    **settings: object,
) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32} | settings)  # type: ignore[arg-type]
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    parallel = ParallelConfig(pipeline_parallel_size=num_stages)
    engine = EngineConfig(worker=WorkerConfig(model=""), cache=cache, scheduler=config, parallel=parallel)
    kv_cache = KVCacheConfig(num_blocks, max_model_len, num_state_slots=num_state_slots, state_chunk=state_chunk)
    return Scheduler(engine, kv_cache, Clock())


def step(scheduler: Scheduler, token_id: int = 50) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Run a step whose worker answers ``token_id`` for every request that draws a token."""
    scheduled = scheduler.schedule()
    check_counts(scheduler, scheduled)
    sampled = []
    for request_id in scheduled.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        sampled.append([token_id] if request.kv.num_computed_tokens == request.num_tokens else [])
    result = ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled)
    outputs = scheduler.results.apply(scheduled, result)
    check_scheduler(scheduler)
    return scheduled, outputs


class TimedSteps:
    """Steps a scheduler under a virtual clock; a step takes what its tokens cost, about as on two processors.

    Attributes:
        now: Seconds.
        first: Seconds from the arrival of each request to its first token.
        gaps: Seconds between two tokens of a request, of all requests.
        num_tokens: Output tokens of all requests.
    """

    def __init__(self, decode: float, row: float, token: float, alone: float, **settings: object) -> None:
        """``decode``: seconds of a step in which requests decode, ``row``: those of each of them; ``token``: those of a
        prompt token; ``alone``: those of a step of prompts alone besides. ``settings``: those of the scheduler."""
        self.now, self.first, self.gaps, self.num_tokens = 0.0, dict[str, float](), list[float](), 0
        self._decode, self._row, self._token, self._alone = decode, row, token, alone
        defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "prefill_tokens_beside_decode": 128}
        config = SchedulerConfig(**defaults | settings)  # type: ignore[arg-type]
        cache = CacheConfig(block_size=16)
        engine = EngineConfig(worker=WorkerConfig(model=""), cache=cache, scheduler=config)
        self.scheduler = Scheduler(engine, KVCacheConfig(8000, 20000), lambda: round(self.now * 1e9) + 1)
        if (share := self.scheduler._planner.prompt_share) is not None:
            share.observe(2048, 2048 * token)
            share.observe(0, decode + row)
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, name: str, num_tokens: int, max_tokens: int, tenant: str = "") -> None:
        """Add a request that arrives now, with a prompt that begins as no other one does."""
        self._arrived[name] = self.now
        prompt = [len(self._arrived) % 50, len(self._arrived) // 50, *[1] * (num_tokens - 2)]
        self.scheduler.add_request(make_request(name, prompt, max_tokens, tenant=tenant))

    def arrived(self, at: float) -> None:
        """Let the request that was added last have arrived at a time before now, while a step ran."""
        name = next(reversed(self._arrived))
        self._arrived[name] = at
        self.scheduler.requests[name].times.arrival_ns = round(at * 1e9) + 1

    def step(self) -> SchedulerOutput:
        """Run a step, and wait for as long as it takes."""
        scheduled = self.scheduler.schedule()
        requests = [self.scheduler.requests[each] for each in scheduled.num_scheduled_tokens]
        counts = scheduled.num_scheduled_tokens.values()
        num_decoding = sum(each.first_output_sent for each in requests)
        num_prompt_tokens = sum(counts) - num_decoding
        others = self._decode + self._row * num_decoding if num_decoding else self._alone
        seconds = others + self._token * num_prompt_tokens
        self.now += seconds
        self.scheduler.note_step_time(scheduled, seconds)
        sampled = [[50] if each.kv.num_computed_tokens == each.num_tokens else [] for each in requests]
        result = ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled)
        for output in self.scheduler.results.apply(scheduled, result):
            self._note(output)
        return scheduled

    def _note(self, output: EngineCoreOutput) -> None:
        name = output.request_id
        self.num_tokens += len(output.new_token_ids)
        if name in self.first:
            self.gaps.append(self.now - self._last[name])
        else:
            self.first[name] = self.now - self._arrived[name]
        self._last[name] = self.now

    def finish(self) -> None:
        """Run until no request is left."""
        while self.scheduler.requests:
            self.step()
