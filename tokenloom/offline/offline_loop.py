"""Starts the core of the offline API, steps it, and shows the progress; each step advances all requests in flight."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from tqdm.auto import tqdm

from tokenloom.engine_core.client.core_client import CoreClient, InprocClient, SyncMPClient
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import EngineConfigError, EngineDeadError, EnginePausedError
from tokenloom.engine_core.data.messages import ArrivedRows, EngineCoreOutput, EngineCoreOutputs, RowsWanted
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.services.engine.core.workers import CORE_COMMAND, WORKER_COMMAND, make_worker
from tokenloom.services.engine.records.engine_settings import may_find_gpu

from .media import OfflineMedia, PromptMedia
from .offline_request import CoreRefusal, OfflineRequest

log = logging.getLogger(__name__)


class InFlight(Protocol):
    """A request with its samples, each with its ``core_request`` and its ``completion``."""

    @property
    def samples(self) -> Sequence[Any]: ...

    @property
    def finished(self) -> bool: ...

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens of all samples so far."""

    @property
    def media(self) -> PromptMedia | None:
        """Return the images and sounds of the prompt; None if it has none."""

    @property
    def error(self) -> Exception | None:
        """Return why it failed: ``ValueError`` if the request was at fault, ``RuntimeError`` if the core was."""

    def accept(self, sample: Any, step: EngineCoreOutput) -> bool:
        """Add a step's result to a sample. Returns whether the sample ended without the core's knowledge.

        Raises `CoreRefusal`.
        """

    def abort(self, error: Exception | None = None) -> None:
        """End the samples that have not ended, because of an error if there is one."""

    def use_weights(self, version: int, *, has_begun: bool) -> None:
        """Note which weights compute what comes next, by how often others were loaded before.

        ``has_begun``: others have computed tokens that :meth:`accept` has not brought yet.
        """


def check_failures(errors: Sequence[Exception | None]) -> None:
    """Raise the first of these errors, one for each request, if all have failed: nothing is lost then. If some have,
    log it."""
    failures = [error for error in errors if error is not None]
    if not failures:
        return
    if len(failures) == len(errors):
        raise failures[0]
    log.warning("%d of %d requests failed; the first: %s", len(failures), len(errors), failures[0])


def start_core(config: EngineConfig, *, has_own_process: bool) -> CoreClient:
    """Load the model; with ``has_own_process`` in a process that logs warnings, otherwise in this one.

    Raises ``ValueError`` for a wrong configuration or checkpoint, and ``EngineStartError`` for such a process.
    """
    if has_own_process or config.parallel.world_size > 1:
        served_how(config, has_gpu=may_find_gpu(config))  # before processes start, of which each would find it out
    if not has_own_process and config.kv.tier:
        raise ValueError(f"{config.kv.tier}: a core in this process loads no KV blocks; set engine_process=True")
    if not has_own_process:
        return InprocClient(config, make_executor(config, make_worker, WORKER_COMMAND))
    try:
        return SyncMPClient(config, [*CORE_COMMAND, "--instance-id", "llm", "--log-level", "warning"])
    except EngineConfigError as error:
        raise ValueError(str(error)) from None


class OfflineLoop:
    """Holds the requests in flight. They may belong to several calls: a call may begin while a stream is being read."""

    def __init__(self, client: CoreClient, media: OfflineMedia) -> None:
        """``media``: computes the rows that the core asks for."""
        self._client = client
        self._media = media
        self._live: dict[str, tuple[InFlight, Any]] = {}
        self._enqueued: list[OfflineRequest] = []
        self.on_step: Callable[[EngineCoreOutputs], None] | None = None
        """Is called with what each step brings; None: nobody wants to know."""
        self.weights_version = 0
        """How often other weights were loaded."""

    def weights_replaced(self) -> None:
        """Note that the engine has loaded other weights, which compute what comes next of the requests in flight."""
        self.weights_version += 1
        unread, begun = self._client.unread(), dict[InFlight, bool]()
        for request_id, (request, _) in self._live.items():
            if not unread.get(request_id):  # otherwise the old weights have ended it
                begun[request] = False
        for request_id in unread.keys() & self._live.keys():  # also of samples that have ended, beside ones that wait
            request, _ = self._live[request_id]
            if request in begun:
                begun[request] = True
        for request, has_begun in begun.items():
            request.use_weights(self.weights_version, has_begun=has_begun)

    def run(self, requests: Sequence[InFlight], use_tqdm: bool | Callable[..., Any]) -> None:
        """Add requests that have not ended already, and step until all of them have; one that fails has its error, and
        the others go on. Raises ``EnginePausedError``.

        Args:
            use_tqdm: Whether to show a progress bar, or what to make it with.
        """
        begun = [request for request in requests if not request.finished]
        with self.running(begun), Progress(len(requests), use_tqdm) as progress:
            live = set(begun)
            while live:
                ended = live.intersection(self.step())
                live -= ended
                for request in ended:
                    progress.finished(len(request.samples[0].core_request.prompt_token_ids), request.num_tokens)

    def enqueue(self, request: OfflineRequest) -> None:
        """Add a request that `next_ended` will return. Raises ``EnginePausedError``."""
        self.add(request)
        self._enqueued.append(request)

    def add(self, request: InFlight) -> None:
        """Add a request, which :meth:`step` advances. Raises ``EnginePausedError``."""
        self._client.check_awake()
        try:
            self._add(request)
        except BaseException:
            self.abort([request])
            raise

    def next_ended(self) -> list[OfflineRequest]:
        """Step until some of the enqueued requests have ended or failed, and return them; empty if none is enqueued."""
        while self._enqueued:
            ended = [request for request in self._enqueued if request.output.finished]
            if ended:
                self._enqueued = [request for request in self._enqueued if not request.output.finished]
                return ended
            self.step()
        return []

    @contextmanager
    def running(self, requests: Sequence[InFlight]) -> Iterator[None]:
        """Add requests; when the context ends, abort those that have not ended. Raises ``EnginePausedError``."""
        if requests:
            # Asked first: while the engine slept or was paused, the loop stepped an engine that had no work, for ever.
            self._client.check_awake()
        try:
            for request in requests:
                self._add(request)
            yield
        finally:
            self.abort([request for request in requests if not request.finished])

    def step(self) -> list[InFlight]:
        """Compute a step and return the requests that it ended.

        Raises ``EnginePausedError`` if none of the requests in flight can advance; they stay. After any other exception
        no request is in flight: those of other calls have the error.
        """
        try:
            return self._step()
        except EnginePausedError:
            raise
        except BaseException as error:  # keyboard interrupts included: the next call finds an idle engine
            reason = RuntimeError(f"a step of the engine failed: {type(error).__name__}: {error}")
            self.abort([request for request, _ in self._live.values()], reason)
            # The step may have ended before it filled the blocks that it announced.
            with contextlib.suppress(EngineDeadError):  # a core in a process of its own, of which nothing is left
                self._client.call_utility("reset_prefix_cache")
            raise

    def _add(self, request: InFlight) -> None:
        if self.weights_version:
            request.use_weights(self.weights_version, has_begun=False)
        for sample in request.samples:
            self._live[sample.core_request.request_id] = request, sample
            self._client.add_request(sample.core_request)

    def _step(self) -> list[InFlight]:
        ended: list[InFlight] = []
        step = self._client.get_output()
        if self.on_step is not None:
            self.on_step(step)
        for output in step.outputs:
            # One step may hold the token whose text ends a request and, after it, the end of its grammar. The second
            # one finds no request, which once raised a KeyError that ended all of them.
            if (live := self._live.get(output.request_id)) is None:
                continue  # it ended earlier in this step, with its request or at a stop string
            request, sample = live
            try:
                if request.accept(sample, output):
                    self._client.abort_requests([output.request_id])
            # A refusal of the core concerns this request only: taken for a failed step, it aborted the requests of all
            # callers.
            except CoreRefusal as refusal:  # a fault of this request only
                self.abort([request], refusal.error)
                ended.append(request)
                continue
            if sample.completion.finished():
                del self._live[output.request_id]
                if request.finished:
                    ended.append(request)
        if step.rows_wanted:
            ended += self._bring_rows(step.rows_wanted)
        return ended

    def _bring_rows(self, wanted: Sequence[RowsWanted]) -> list[InFlight]:
        """Compute the rows of images and sounds that the core asks for. Returns the requests of which some cannot be
        computed; they have ended."""
        failed, brought = list[InFlight](), set[int]()
        for each in wanted:
            if each.number in brought or (live := self._live.get(each.request_id)) is None:
                continue
            request, _ = live
            assert request.media is not None, "the core asks for what a prompt does not have"
            try:
                rows = self._media.rows(request.media, each.key)
            except ValueError as error:  # a fault of this image or sound: other requests go on
                self.abort([request], error)
                failed.append(request)
                continue
            self._client.send_rows(ArrivedRows(each.key, each.number, 0, rows))
            brought.add(each.number)
        return failed

    def abort(self, requests: Sequence[InFlight], error: Exception | None = None) -> None:
        """End requests that have not ended, because of an error if there is one."""
        ids = [sample.core_request.request_id for request in requests for sample in request.samples]
        self._client.abort_requests([id_ for id_ in ids if self._live.pop(id_, None) is not None])
        for request in requests:
            request.abort(error)


class Progress:
    """Counts finished prompts and estimates speeds. Use it as a context manager."""

    def __init__(self, num_prompts: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """``use_tqdm``: whether to show a bar, or a function that makes it."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(
            total=num_prompts,
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not use_tqdm,
            postfix=_speeds(0, 0, 1.0),
        )
        self._start = time.perf_counter()
        self._input_tokens = self._output_tokens = 0

    def finished(self, input_tokens: int, output_tokens: int) -> None:
        """Count one finished prompt."""
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        self._bar.postfix = _speeds(self._input_tokens, self._output_tokens, time.perf_counter() - self._start)
        self._bar.update(1)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _speeds(input_tokens: int, output_tokens: int, seconds: float) -> str:
    return f"est. speed input: {input_tokens / seconds:.2f} toks/s, output: {output_tokens / seconds:.2f} toks/s"
