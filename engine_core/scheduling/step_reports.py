"""Reports steps to operators: a log line for each one, and a dump of one that failed."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..data.config import ObservabilityConfig
from ..data.messages import SchedulerStats
from ..data.request import Request
from ..data.scheduler_output import SchedulerOutput

log = logging.getLogger(__name__)


class IterationLog:
    """Logs a line for each step of one core (vLLM's ``--enable-logging-iteration-details``).

    Steps end in the order in which they begin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._started: deque[float] = deque()  # bounded by the steps that may be in flight

    def begin(self) -> None:
        self._started.append(self._clock())

    def end(self, step: int, scheduled: SchedulerOutput) -> None:
        """Log the oldest step, number ``step``. A request decodes if the worker knows it and it computes one token, or
        one and its drafts."""
        milliseconds = (self._clock() - self._started.popleft()) * 1e3
        cached = scheduled.scheduled_cached_reqs
        num_scheduled = scheduled.num_scheduled_tokens
        drafts = scheduled.draft_token_ids
        decodes = [
            num_scheduled[r]
            for r in cached.req_ids
            if (num_scheduled[r] == 1 or r in drafts) and r not in cached.resumed_token_ids
        ]
        log.info(
            "Iteration(%d): %d context requests, %d context tokens, %d generation requests, %d generation tokens, "
            "iteration elapsed time: %.2f ms",
            step,
            len(num_scheduled) - len(decodes),
            scheduled.total_num_scheduled_tokens - sum(decodes),
            len(decodes),
            sum(decodes),
            milliseconds,
        )

    def abandon(self) -> None:
        """Forget the steps in flight: they failed."""
        self._started.clear()


def dump_failed_step(
    config: ObservabilityConfig,
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
) -> None:
    """Write a failed step to the log and, if a directory is configured, to a file there. Never raises ``OSError``."""
    text = msgspec.json.encode(_describe_step(error, scheduled, requests, stats, tokens=config.dump_tokens))
    log.error("a step failed; the scheduler asked for: %s", text.decode())
    if not config.dump_dir:
        return
    try:
        (Path(config.dump_dir) / f"failed-step-{time.time_ns()}.json").write_bytes(text)
    except OSError as problem:
        log.error("the dump of a failed step cannot be written: %s", problem)


def _describe_step(
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
    *,
    tokens: bool,
) -> dict[str, Any]:
    """Return the step as plain data. Without ``tokens`` it holds nothing of a prompt or an output."""
    cached = scheduled.scheduled_cached_reqs
    return {
        # The message of an error may quote a prompt, so it is left out together with the tokens.
        "error": f"{type(error).__name__}: {error}" if tokens else type(error).__name__,
        "num_scheduled_tokens": scheduled.num_scheduled_tokens,
        "new": [new.req_id for new in scheduled.scheduled_new_reqs],
        "resumed": list(cached.resumed_token_ids),
        "finished": scheduled.finished_req_ids,
        "preempted": scheduled.preempted_req_ids,
        "requests": {
            request_id: _describe(requests[request_id], tokens=tokens)
            for request_id in scheduled.num_scheduled_tokens
            if request_id in requests
        },
        "stats": msgspec.structs.asdict(stats),
    }


def _describe(request: Request, *, tokens: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "status": request.status.name,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.kv.num_computed_tokens,
        "num_output_placeholders": request.num_output_placeholders,
        "block_ids": request.kv.block_ids,
        "max_tokens": request.sampling_params.max_tokens,
        "temperature": request.sampling_params.temperature,
    }
    if tokens:
        described["token_ids"] = request.all_token_ids
    return described
