"""The scheduler's side of structured outputs: who waits for a grammar, and whose next token must follow one."""

from collections.abc import Iterator, Mapping

from ..structured_output.grammar_backend import GrammarError
from ..structured_output.manager import FIELD, Compiled, ConstrainedRow, GrammarStep, StructuredOutputManager
from ..wire.scheduler_output import SchedulerOutput
from .request import Request, RequestStatus

NO_CHOICE = (
    "allowed_token_ids: none of them may come next, after what bad_words, logit_bias, min_tokens and "
    "structured_outputs forbid"
)
"""Why a request ends whose masks leave no token."""


class ConstrainedRequests:
    """Belongs to one scheduler. Requests without a structured output never come here."""

    def __init__(self, manager: StructuredOutputManager | None) -> None:
        """None: this engine has no tokenizer, and refuses them."""
        self._manager = manager

    @property
    def num_waiting(self) -> int:
        return self._manager.num_compiling if self._manager is not None else 0

    def has_news(self) -> bool:
        """Whether :meth:`take_compiled` would give anything."""
        return self._manager is not None and self._manager.has_news()

    def wait(self, request: Request) -> Compiled | None:
        """Has the request wait, in no queue, for its grammar; not None: why it cannot."""
        request_id = request.request_id
        request.set_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        if self._manager is None:
            return Compiled(request_id, f"{FIELD}: this engine has no tokenizer to constrain its output by", FIELD)
        try:
            self._manager.compile(request_id, request.sampling_params)
        except GrammarError as error:
            return Compiled(request_id, f"{FIELD}: {error}")
        return None

    def take_compiled(self) -> Iterator[Compiled]:
        """Who waits no more, since the last call."""
        if self._manager is not None:
            yield from self._manager.take_compiled()

    def finished(self, request: Request) -> None:
        """It has ended, wherever it stood."""
        if self._manager is not None and request.sampling_params.structured_output is not None:
            self._manager.forget(request.request_id)

    def start_step(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> GrammarStep | None:
        """Has the bitmasks computed of those in the step that draw a token; None: there are none."""
        if self._manager is None or not self._manager.live:
            return None
        rows = []
        for request_id, grammar in self._manager.live.items():
            request = requests[request_id]
            if request_id in scheduled.num_scheduled_tokens and request.num_computed_tokens == request.num_tokens:
                num_seen = request.num_prompt_tokens + grammar.num_accepted
                rows.append(ConstrainedRow(request_id, request.all_token_ids[num_seen:]))
        return self._manager.start_step(rows) if rows else None

    def awaits_tokens(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> bool:
        """Whether bitmasks of the step follow from tokens that are still in flight: none can be computed yet."""
        if self._manager is None or not self._manager.live:
            return False
        return any(
            request_id in scheduled.num_scheduled_tokens
            and requests[request_id].num_computed_tokens > requests[request_id].num_tokens
            for request_id in self._manager.live
        )
