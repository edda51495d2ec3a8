"""A step while the scheduler plans it."""

from ..wire.messages import EngineCoreOutput
from ..wire.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from .request import Request


class StepPlan:
    """Collects, in columns, what the worker must know, and keeps the token budget."""

    __slots__ = (
        "_budget_at_start",
        "_computed",
        "_new",
        "_new_block_ids",
        "_req_ids",
        "_resumed",
        "budget",
        "early_outputs",
        "finished_req_ids",
        "num_scheduled_tokens",
        "preempted_req_ids",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._budget_at_start = budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted_req_ids: list[str] = []
        self.finished_req_ids: list[str] = []
        self.early_outputs: list[EngineCoreOutput] = []
        self._new: list[NewRequestData] = []
        self._req_ids: list[str] = []
        self._new_block_ids: list[list[int]] = []
        self._computed: list[int] = []
        self._resumed: dict[str, list[int]] = {}

    def add_running(self, request: Request, num_new_tokens: int, new_block_ids: list[int]) -> None:
        """A request that the worker has a row of."""
        self._req_ids.append(request.request_id)
        self._new_block_ids.append(new_block_ids)
        self._computed.append(request.num_computed_tokens)
        self._add(request, num_new_tokens)

    def add_resumed(self, request: Request, num_new_tokens: int) -> None:
        """A request whose row is built anew."""
        self._resumed[request.request_id] = request.all_token_ids.copy()
        self.add_running(request, num_new_tokens, request.block_ids.copy())

    def add_new(self, request: Request, num_new_tokens: int) -> None:
        """A request that the worker has never seen."""
        self._new.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
                sampling_params=request.sampling_params,
                block_ids=request.block_ids.copy(),
                num_computed_tokens=request.num_computed_tokens,
                prompt_embeds=request.prompt_embeds,
            )
        )
        self._add(request, num_new_tokens)

    def _add(self, request: Request, num_new_tokens: int) -> None:
        request.num_computed_tokens += num_new_tokens
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=CachedRequestData(self._req_ids, self._new_block_ids, self._computed, self._resumed),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=self._budget_at_start - self.budget,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
        )
