"""What was asked of the workers in a step that failed: for whoever looks for the reason, never for a client."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config import ObservabilityConfig
from ..wire.messages import SchedulerStats
from ..wire.scheduler_output import SchedulerOutput
from .request import Request

log = logging.getLogger(__name__)


def dump_failed_step(
    config: ObservabilityConfig,
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
) -> Path | None:
    """Writes it to the log, and to a file where there is a directory for it: its path. Never raises ``OSError``."""
    text = msgspec.json.encode(describe_step(error, scheduled, requests, stats, tokens=config.dump_tokens))
    log.error("a step failed; the scheduler asked for: %s", text.decode())
    if not config.dump_dir:
        return None
    path = Path(config.dump_dir) / f"failed-step-{time.time_ns()}.json"
    try:
        path.write_bytes(text)
    except OSError as problem:
        log.error("the dump of a failed step cannot be written: %s", problem)
        return None
    return path


def describe_step(
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
    *,
    tokens: bool,
) -> dict[str, Any]:
    """The step as plain data. ``tokens``: with token ids; without, nothing of a prompt or an output is in it."""
    cached = scheduled.scheduled_cached_reqs
    return {
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
    params = request.sampling_params
    described: dict[str, Any] = {
        "status": request.status.name,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_output_placeholders": request.num_output_placeholders,
        "block_ids": request.block_ids,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
    }
    if tokens:
        described["token_ids"] = request.all_token_ids
    return described
