"""Runs pooling calls, whichever API they came through: admits them, encodes their prompts and sends them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext
from random import Random

from tokenloom.request import errors, validation
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, Tracer
from tokenloom.v1 import types_pb2

from ..generation.admission import AdmittedRequest, RequestAdmission
from ..generation.block_hashing import add_hashes
from ..generation.request_trace import traced
from ..mesh.mesh_view import MeshView
from ..mesh.output_pool import OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..metrics.gateway_metrics import GatewayMetrics
from ..records.generate_request import SHEDDABLE_PRIORITY, GenerateRequest
from ..records.pooling_input import PoolingInput
from ..records.pooling_tasks import task_name
from ..request_log.request_record import record_generation
from .pooling_preparation import check_task, encode
from .running_pooling import RunningPooling

MOST_AT_ONCE = 256
"""Prompts of one call that are in work at the same time: enough to fill the batches of several engines."""


class PoolingRunner:
    """Admits pooling calls and runs them."""

    def __init__(
        self,
        tokenizers: TokenizerClient,
        mesh: MeshView,
        outputs: OutputPool,
        metrics: GatewayMetrics,
        admission: RequestAdmission,
        *,
        default_timeout: float,
        most_urgent_priority: int,
        tracer: Tracer | None,
        model: str,
        random: Random,
        clock: Callable[[], int],
    ) -> None:
        """The arguments are as in ``Generator``."""
        self._tokenizers = tokenizers
        self._mesh = mesh
        self._outputs = outputs
        self._metrics = metrics
        self._admission = admission
        self._default_timeout = default_timeout
        self._most_urgent_priority = most_urgent_priority
        self._tracer = tracer
        self._model = model
        self._random = random
        self._clock = clock

    def limits(self) -> types_pb2.ModelLimits:
        """Return the limits of the model. Raises ``Unavailable`` before the first engine serves."""
        info = self._tokenizers.info
        if info is None or (limits := self._mesh.limits(info.fingerprint)) is None:
            raise errors.Unavailable("no engine is serving yet; retry")
        return limits

    @asynccontextmanager
    async def open(self, pooling: PoolingInput, trace_headers: Headers = NO_HEADERS) -> AsyncIterator[RunningPooling]:
        """Run a call to its last result, and hold its place for the length of the ``async with``.

        Raises any of :mod:`errors`; :class:`errors.DeadlineExceeded` covers the time of the body too.
        """
        job, started_ns = pooling.job, self._clock()
        limits = self.limits()
        check_task(pooling.params, limits)
        timeout = min(job.timeout or self._default_timeout, self._default_timeout)
        tracing = (
            nullcontext()
            if self._tracer is None
            else traced(self._tracer, job, trace_headers, self._model, task_name(pooling.params.task))
        )
        with ExitStack() as held, tracing as trace:
            place = held.enter_context(self._admission.admit(job, timeout, most_at_once=MOST_AT_ONCE))
            try:
                async with asyncio.timeout(timeout) as limit:
                    call = await self._begin(pooling, place, limits)
                    if trace is not None:
                        trace.outcome = call
                    try:
                        await call.run(self._outputs, place.num_outputs, lambda: _seconds_left(limit))
                        self._observe(pooling, call, started_ns)
                        yield call
                    finally:
                        record_generation(call)
                        call.close()
            except TimeoutError:
                raise errors.DeadlineExceeded(f"the request took longer than {timeout:g} s") from None

    async def _begin(
        self, pooling: PoolingInput, place: AdmittedRequest, limits: types_pb2.ModelLimits
    ) -> RunningPooling:
        prompts = await encode(pooling, self._tokenizers, limits)
        await add_hashes(prompts, self._mesh.block_size, pooling.job.cache_salt)
        place.num_used = sum(len(prompt.token_ids) for prompt in prompts)
        place.reserve(place.num_used)
        on_end = _Progress(place, len(prompts)).step
        priority = self._priority(pooling.job, limits)
        return RunningPooling(pooling, prompts, self._model, priority, self._draw_id(), self._draw_id, on_end)

    def _priority(self, job: GenerateRequest, limits: types_pb2.ModelLimits) -> int:
        if job.priority:
            validation.check_priority(job.priority, limits)
        priority = max(job.priority, self._most_urgent_priority) if job.priority else 0
        return max(priority, SHEDDABLE_PRIORITY) if job.is_sheddable and limits.priorities else priority

    def _observe(self, pooling: PoolingInput, call: RunningPooling, started_ns: int) -> None:
        seconds = (self._clock() - started_ns) / 1e9
        task = task_name(pooling.params.task)
        self._metrics.observe_pooled(task, call.usage, pooling.job.tenant, call.num_ended, seconds)

    def _draw_id(self) -> str:
        return self._random.randbytes(16).hex()


class _Progress:
    """Reports the prompts of a call that have ended to its place, which counts those that are in work at once."""

    def __init__(self, place: AdmittedRequest, num_prompts: int) -> None:
        self._place = place
        self._num_prompts = num_prompts
        self._num_ended = self._num_begun = 0

    def step(self) -> None:
        """Count one more prompt that has ended."""
        self._num_ended += 1
        if self._num_ended * self._place.num_outputs >= (self._num_begun + 1) * self._num_prompts:
            self._place.begin_output(self._num_begun)
            self._num_begun += 1


def _seconds_left(limit: asyncio.Timeout) -> float:
    when = limit.when()
    assert when is not None
    return when - asyncio.get_running_loop().time()
