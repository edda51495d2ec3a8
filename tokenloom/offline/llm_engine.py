"""An engine that a program drives step by step: ``LLM`` and ``AsyncLLM`` are built on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer

from tokenloom.engine_core.client.core_client import CoreClient
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer
from tokenloom.model_files.model_path import resolve, served_name
from tokenloom.request.chat_template import read_chat_template
from tokenloom.request.errors import TokenloomError
from tokenloom.services.engine.records.engine_settings import for_checkpoint
from tokenloom.services.engine.records.grammar_config import reasoning_mode
from tokenloom.services.engine.records.identity import kv_identity, make_fingerprint, media_limits, pooling_limits
from tokenloom.services.engine.records.stat_log import StatIntervals, StatLine, StatLogger, plugged_loggers
from tokenloom.v1 import types_pb2

from .engine_args import EngineArgs
from .lora_request import LoRARequest, OfflineLoras
from .media import OfflineMedia
from .offline_loop import OfflineLoop, start_core
from .offline_request import OfflineRequest
from .outputs import EngineOutput, PoolingParams
from .pooling import OfflinePooledRequest, PoolingPrompts
from .prompts import ChatPrompts, Message, Prompt, TokenizedPrompt, read_prompt
from .request_builder import RequestBuilder
from .sampling_params import SamplingParams
from .tensor_file import OwnWeights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RequestNews:
    """Tells what a request has produced since it was asked about.

    Attributes:
        error: With the last news of a request that failed: ``ValueError`` if it was at fault, otherwise
            ``RuntimeError``.
    """

    request_id: str
    output: EngineOutput
    error: Exception | None


class LLMEngine:
    """Runs the requests of a program with one model, with vLLM's methods. For one thread at a time.

    The program adds requests whenever it likes, and each call of :meth:`step` advances all of them together::

        engine = LLMEngine(EngineArgs("tokenloom-demo"))
        engine.add_request("0", "Once upon", SamplingParams(max_tokens=16))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Wrong arguments raise ``ValueError``. While the engine sleeps or is paused, :meth:`add_request` and :meth:`step`
    raise ``EnginePausedError``; once the engine was closed, or its core has ended in a process of its own
    (``engine_process=True``), all methods that need the core raise ``EngineDeadError``.
    """

    def __init__(self, args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> None:
        """Load the model. Raises ``ValueError``, and ``EngineStartError`` for a process that does not start.

        ``stat_loggers``: get the statistics of each interval, beside the line that is logged without
        ``disable_log_stats``.
        """
        with as_value_error():
            path = resolve(str(args.model))
            template = (
                None if args.chat_template is None else read_chat_template(str(args.chat_template), args.config.plugins)
            )
            info = CheckpointInfo.load(path)
            own = path if args.tokenizer is None else resolve(str(args.tokenizer), weights=False)
            self.tokenizer: Tokenizer = load_tokenizer(own)
        stat_loggers = [*stat_loggers, *plugged_loggers(args.config.plugins)]
        self._path = self._loaded = path
        self._given: OwnWeights | None = None
        self.model_name = args.served_model_name or served_name(path, str(args.model))
        self.info = info if template is None else replace(info, chat_template=template)
        config = for_checkpoint(args.config, str(path), template)
        self.client: CoreClient = start_core(config, has_own_process=bool(args.engine_process))
        self._config = config
        try:
            self._prepare(args, config)
            self._share_kv(path)
        except BaseException:
            self.close()  # otherwise the process of a core would be left
            raise
        self._requests: dict[str, OfflineRequest | OfflinePooledRequest] = {}
        self._stats: StatIntervals | None = None
        if loggers := [*([] if args.disable_log_stats else [StatLine("000")]), *stat_loggers]:
            self._stats = StatIntervals(loggers, args.log_stats_interval)
            self.loop.on_step = self._stats.observe

    def _prepare(self, args: EngineArgs, config: EngineConfig) -> None:
        """Make what turns prompts into requests of the core, which has started."""
        ready = self.client.ready
        limits = types_pb2.ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_logprobs=ready.vocab_size if args.max_logprobs == -1 else args.max_logprobs,
            experts_per_token=ready.experts_per_token,
            priorities=config.scheduler.policy != "fcfs",
            hidden_size=ready.hidden_size if args.enable_prompt_embeds else 0,
            reasoning=reasoning_mode(config.reasoning, finds_reasoning=ready.finds_reasoning),
            argument_schemas=ready.argument_schemas,
            **pooling_limits(ready.pooling),
            **media_limits(ready, config.scheduler),
        )
        self.media = OfflineMedia(self._path, self.tokenizer, config.worker)
        self.builder = RequestBuilder(self.info, self.tokenizer, limits, args.seed, config.reasoning.marks)
        self.loras = OfflineLoras(self.client, are_enabled=config.lora.enable)
        self.loop = OfflineLoop(self.client, self.media)
        self.pooling_prompts = PoolingPrompts(self.tokenizer, limits, self.info.vector_texts)
        self.chats = ChatPrompts(self.info, self.tokenizer, self.model_name, self.media)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> "LLMEngine":
        """Return an engine of these arguments, as vLLM's method of this name does."""
        return cls(engine_args, stat_loggers=stat_loggers)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Add a request, whose outputs :meth:`step` returns. Raises ``ValueError`` for a wrong one; nothing is added
        then.

        Args:
            request_id: Names the outputs; no request that has not ended may have it.
            prompt: As of ``LLM.generate``, or what :meth:`chat_prompt` returned.
            params: How it is continued, or what is pooled from it; None: the model's own.
            lora_request: Needs ``enable_lora=True``.
            priority: Lower values run first. Needs ``scheduling_policy="priority"``.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, not {request_id!r}")
        if not (params is None or isinstance(params, (SamplingParams, PoolingParams))):
            raise ValueError(f"params must be SamplingParams or PoolingParams, not {type(params).__name__}")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is that of a request that has not ended; choose another one")
        request: OfflineRequest | OfflinePooledRequest
        with as_value_error():
            if isinstance(params, PoolingParams):
                request = self._pooled(prompt, params, lora_request, priority)
            else:
                adapted = self.loras.apply([read_prompt(prompt, self.tokenizer, self.media)], lora_request)
                (request,) = self.builder.build(adapted, params, priority)
                request.output.request_id = request_id
        self.loop.add(request)
        self._requests[request_id] = request

    def step(self) -> list[EngineOutput]:
        """Compute a step, and return what it brought: an output for each sample with new tokens, as ``output_kind`` of
        its parameters says it, and for each request that ended. Empty without requests.

        The output of a request that failed has an ``error``. After any exception but ``EnginePausedError`` all requests
        have ended with one, and the next call returns their outputs.
        """
        return [news.output for news in self.advance()]

    def advance(self) -> list[RequestNews]:
        """Do as :meth:`step`, and return the errors of requests too."""
        if not self._requests:
            return []
        if not any(request.finished for request in self._requests.values()):  # a step that failed has ended some
            self.loop.step()
        news: list[RequestNews] = []
        for request_id, request in list(self._requests.items()):
            news += self._news(request_id, request)
        return news

    def abort_request(self, request_ids: str | Sequence[str]) -> list[EngineOutput]:
        """End requests. Returns their last outputs, which no step returns; ids of none are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        return [news.output for news in self.end(names)]

    def end(self, request_ids: Sequence[str] | None = None) -> list[RequestNews]:
        """Do as :meth:`abort_request`, and return the errors of requests too. None: end all."""
        names = self._requests if request_ids is None else request_ids
        found = [(name, self._requests[name]) for name in dict.fromkeys(names) if name in self._requests]
        self.loop.abort([request for _, request in found])
        return [news for name, request in found for news in self._news(name, request)]

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has anything to compute, or to return."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Return the prompt of a conversation, for :meth:`add_request`; the arguments are those of ``LLM.chat``."""
        with as_value_error():
            (prompt,) = self.chats.encode(
                [messages],
                chat_template,
                tools,
                add_generation_prompt=True,
                template_kwargs=chat_template_kwargs,
                processor=mm_processor_kwargs,
            )
        if prompt.error is not None:
            raise prompt.error
        return prompt

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's ``generation_config.json``, and ours for other parameters."""
        return self.builder.default_sampling_params()

    def do_log_stats(self) -> None:
        """End the interval of the statistics now; without a logger do nothing."""
        if self._stats is not None:
            self._stats.log()

    def seconds_to_log(self) -> float | None:
        """Return after how many seconds without a step :meth:`log_if_due` logs something; None: it has nothing."""
        return None if self._stats is None else self._stats.seconds_left()

    def log_if_due(self) -> None:
        """End the interval of the statistics if it is over, as each step does."""
        if self._stats is not None:
            self._stats.log_if_due()

    def check_health(self) -> None:
        """Raise ``UtilityError`` if a worker fails or does not answer in time, ``EngineDeadError``."""
        self.client.call_utility("check_health")

    def reset_prefix_cache(self) -> bool:
        """Drop the KV blocks of earlier prompts. Returns whether it succeeded."""
        return bool(self.client.call_utility("reset_prefix_cache"))

    def reset_mm_cache(self) -> None:
        """Forget the rows of images and sounds that were computed here."""
        self.media.reset()

    def reset_encoder_cache(self) -> None:
        """Forget the rows of images and sounds that wait in the engine; requests that need some get them again."""
        self.client.call_utility("reset_encoder_cache")

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and release memory, as ``LLM.sleep``."""
        self.client.call_utility("sleep", level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what :meth:`sleep` released, as ``LLM.wake_up``."""
        self.client.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return bool(self.client.call_utility("is_sleeping"))

    def reload_weights(self, path: str | Path | None = None) -> None:
        """Load the weights of another checkpoint, as ``LLM.reload_weights``."""
        with as_value_error():
            directory = self._path if path is None else resolve(str(path))
        self._load_weights(directory)
        self._given = None  # what was given by tensors is not loaded any more

    def update_weights(self, tensors: "Mapping[str, Tensor]", *, mode: str | None = None) -> int:
        """Load weights that a trainer has in its memory, in the place of all weights, and forget cached prefixes.

        They are copied into shared memory, which the workers map, or into a temporary folder if there is no room for
        three copies, and checked before any weight is replaced. Returns the number of the weights, which outputs have
        in ``weights_versions``.

        Args:
            tensors: All tensors of the checkpoint by name, in its dtypes and shapes, on any device.
            mode: What happens to requests that run: they end (``abort``), end first (``wait``), or go on with the new
                weights (``keep``), which compute their KV anew. None: the engine must be paused, or idle.

        Raises ``ValueError`` if names, dtypes or shapes differ, ``UtilityError`` as :meth:`reload_weights`. The old
        weights stay then.
        """
        with as_value_error():
            given = self._given or OwnWeights(self._loaded)
            path = given.write(tensors)
        is_ours = mode is not None and not self.is_paused()
        try:
            if is_ours:
                self.pause_generation(str(mode))  # which may be interrupted while requests end
            self._load_weights(path)
        finally:
            if is_ours and not self.is_sleeping():
                self.resume_generation()
        given.use(path)
        self._given = given
        return self.loop.weights_version

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Run no request until :meth:`resume_generation`, and return when none runs.

        ``mode``: what happens to those that have begun: they end (``abort``), end first (``wait``), or stay as they
        are (``keep``). Raises ``UtilityError`` for another mode, and if paused in another one.
        """
        self.client.call_utility("pause", mode, clear_cache)

    def resume_generation(self) -> None:
        """Let requests run again. Raises ``UtilityError`` while the engine sleeps."""
        self.client.call_utility("resume")

    def is_paused(self) -> bool:
        """Return whether the engine is paused, or sleeps."""
        return bool(self.client.call_utility("calls_to_run"))

    def fingerprint(self, weights: Path | None = None) -> types_pb2.Fingerprint:
        """Return what identifies the model and how it is computed, as engines of a mesh say it. Reads all files of the
        weights, unless their hash is cached. ``weights``: their directory; None: the one that is loaded."""
        return make_fingerprint(weights or self._loaded, self.model_name, self.client.ready, self._config)

    def _share_kv(self, weights: Path) -> None:
        """Let the core share KV blocks with engines of these weights, if its options say so."""
        if self._config.kv.store or self._config.kv.connector:
            self.client.call_utility("share_kv", kv_identity(self.fingerprint(weights), self._config))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start recording what the workers compute, as ``LLM.start_profile``."""
        self.client.call_utility("profile", True, profile_prefix or "")

    def stop_profile(self) -> None:
        """Write the profile to ``profiler_dir``. Raises ``UtilityError`` if none is being recorded."""
        self.client.call_utility("profile", False)

    def collective_rpc(self, method: str, args: Sequence[object] = ()) -> list[object]:
        """Call a method on every worker, as ``LLM.collective_rpc``; return the results by rank."""
        if method == "reload_weights":  # not the workers' own: the core must know of it
            self.reload_weights(*cast("Sequence[str]", args))
            return [None]
        results = self.client.call_utility("collective_rpc", method, list(args))
        assert isinstance(results, list)
        return results

    def close(self) -> None:
        """Release the model and the KV cache. Idempotent; the object computes nothing afterwards."""
        self.client.close()
        self._given = None

    def _load_weights(self, path: Path) -> None:
        self.client.call_utility("reload_weights", str(path))
        self._loaded = path
        self.media.use_weights(path)
        self._share_kv(path)
        self.loop.weights_replaced()

    def _pooled(
        self, prompt: Prompt | TokenizedPrompt, params: PoolingParams, lora_request: LoRARequest | None, priority: int
    ) -> OfflinePooledRequest:
        if isinstance(prompt, TokenizedPrompt) or lora_request is not None or priority:
            raise ValueError(
                "what is pooled from has no chat template, lora_request or priority; give a text or tokens"
            )
        request = self.pooling_prompts.request(prompt, params)
        if request.error is not None:
            raise request.error
        return request

    def _news(self, request_id: str, request: OfflineRequest | OfflinePooledRequest) -> list[RequestNews]:
        """Return what a request has produced since the last call, and forget it if it has ended."""
        if request.finished:
            del self._requests[request_id]
        outputs: list[EngineOutput]
        if isinstance(request, OfflineRequest):
            outputs = list(request.news())
            # Two samples may end in one step: who reads until an output is the last one would miss that of the second.
            outputs[:-1] = [replace(output, finished=False) for output in outputs[:-1]]
        else:
            outputs = [replace(request.output(), request_id=request_id)] if request.finished else []
        return [RequestNews(request_id, output, request.error) for output in outputs]


@contextmanager
def as_value_error() -> Iterator[None]:
    """Turn the services' errors into ``ValueError``, which Python callers expect."""
    try:
        yield
    except TokenloomError as error:
        raise ValueError(error.message) from None
