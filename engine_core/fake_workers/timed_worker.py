"""A worker that only waits, for benchmarks: whatever a token costs beside the wait is the mesh's own."""

from ..config import EngineConfig
from ..wire.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from .hash_worker import HashWorker, allowed_tokens

_STRIDE = 7919
"""Prime: outputs run through the whole vocabulary, so that every token has text of its own to be made."""
_LOW_IDS = 300
"""Not drawn from a real vocabulary: end-of-sequence and the like, and single bytes, of which several make a character:
not every one would be an event."""


class TimedWorker(HashWorker):
    """Takes the configured time for a step and draws tokens from their number alone; its cache is never touched."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._num_known: dict[str, int] = {}
        self._step: SchedulerOutput | None = None
        self._first_id = min(_LOW_IDS, self._vocab_size // 8)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._wait(scheduler_output)
        self.begin(scheduler_output)

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Takes a step without waiting for it: whoever calls this keeps the time."""
        self._step = scheduler_output

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._step is not None, "execute_model comes first"
        known, allowed = self._known(self._step), allowed_tokens(grammar, self._vocab_size)
        sampled: dict[str, list[int]] = {}
        for req_id, num_before in self._step.num_computed_tokens().items():
            num_computed = num_before + self._step.num_scheduled_tokens[req_id]
            sampled[req_id] = []
            if num_computed == known[req_id]:
                among = allowed.get(req_id)
                sampled[req_id] = [self._draw(num_computed) if among is None else int(among[num_computed % len(among)])]
                known[req_id] += 1
        req_ids = list(self._step.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids, [sampled[req_id] for req_id in req_ids])

    def _draw(self, num_computed: int) -> int:
        return self._first_id + num_computed * _STRIDE % (self._vocab_size - self._first_id)

    def _known(self, step: SchedulerOutput) -> dict[str, int]:
        """How many tokens each request has, before the step's own."""
        known = self._num_known
        for req_id in step.finished_req_ids + step.preempted_req_ids:
            known.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            known[new.req_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
        for req_id, token_ids in step.scheduled_cached_reqs.resumed_token_ids.items():
            known[req_id] = len(token_ids)
        return known
