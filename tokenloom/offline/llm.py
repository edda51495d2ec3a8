"""The offline API: runs a model in this process, without services."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tokenloom.request.sampling_params import DEFAULT_MAX_LOGPROBS

from .beam_search import BeamSearchOutput, BeamSearchParams, OfflineBeamSearch
from .engine_args import EngineArgs
from .llm_engine import LLMEngine, as_value_error
from .lora_request import LoRARequests
from .offline_loop import check_failures
from .offline_request import OfflineRequest
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTaskName,
    RequestOutput,
    ScoringRequestOutput,
)
from .pooling import OfflinePooling, with_outputs
from .prompts import (
    Message,
    Prompt,
    TokenizedPrompt,
    as_conversations,
    as_prompts,
    read_each,
    read_prompt,
)
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class LLM:
    """Continues prompts and conversations with one model, with vLLM's methods. For one thread at a time.

    Wrong arguments, prompts and parameters, and unsupported checkpoints, raise ``ValueError``. While the engine sleeps
    or is paused, requests raise ``EnginePausedError``, which names the call that lets them run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        seed: int | None = 0,
        served_model_name: str | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        enable_prompt_embeds: bool = False,
        chat_template: str | Path | None = None,
        **engine: Any,
    ) -> None:
        """Load the model. Raises ``ValueError``, and ``EngineStartError`` for a process that does not start.

        Args:
            model: A checkpoint directory, a GGUF file or a hub id; ``tokenloom-demo`` is the model that comes with the
                package.
            tokenizer: Another directory or hub id to read the tokenizer from.
            seed: Determines the outputs of requests without a seed; None: they differ from run to run.
            served_model_name: The ``model_name`` of outputs; by default the directory's name.
            max_logprobs: Limit for ``logprobs`` and ``prompt_logprobs``; -1: no limit.
            enable_prompt_embeds: Whether prompts may hold embeddings.
            chat_template: Jinja source, or the path of a file with it, to use instead of the checkpoint's.
            **engine: Options of the engine by their names in ``docs/reference/configuration.md`` or vLLM's, such as
                ``dtype``, ``max_model_len``, ``max_num_seqs``, ``enable_prefix_caching`` or ``kv_cache_memory_bytes``.
                None stands for the default. ``dtype`` may be torch's; ``max_num_seqs`` is by default at most the token
                budget. ``engine_process=True`` computes in a process of its own: steps and texts are made side by side,
                and if that process ends, this one goes on. Calls then raise ``EngineDeadError``, and so do later ones:
                make another ``LLM``. Programs that use it need no guard around their calls.
                ``disable_log_stats=False`` logs a line of statistics every ``log_stats_interval`` seconds.
                ``plugins=["PACKAGE"]`` names installed packages whose plugins it may load; without it no code of others
                runs.
        """
        args = EngineArgs(
            model,
            tokenizer=tokenizer,
            seed=seed,
            served_model_name=served_model_name,
            max_logprobs=max_logprobs,
            enable_prompt_embeds=enable_prompt_embeds,
            chat_template=chat_template,
            **engine,
        )
        self.llm_engine = made = LLMEngine(args.by_default(disable_log_stats=True))
        self.model_name = made.model_name
        self._client, self._loop, self._builder, self._media = made.client, made.loop, made.builder, made.media
        self._pooling = OfflinePooling(made.pooling_prompts, made.loop)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the outputs in the order of the prompts.

        Of several prompts, one that is refused or fails does so alone: its output has the finish reason ``error`` and
        says why in ``error``. If none is left, the error of the first is raised: ``ValueError`` for a wrong prompt or
        parameter (one that does not fit the context together with its ``max_tokens`` is one), ``RuntimeError`` if the
        engine failed it. :meth:`chat`, :meth:`stream` and the methods that pool do the same.

        Args:
            prompts: Text, ``{"prompt": …}``, ``{"prompt_token_ids": […]}``, ``{"prompt_embeds": tensor}``, a list of
                token ids, or a list of these. A text with the model's mark for each image or
                sound has these in ``multi_modal_data``: ``{"prompt": "<image> What is it?", "multi_modal_data":
                {"image": picture}}``; a sound is ``{"audio": (samples, rate)}``, or a file.
            sampling_params: One for all, or one for each; None: the model's own (``get_default_sampling_params``).
            use_tqdm: Whether to show a progress bar, or what to make it with.
            lora_request: A LoRA adapter for all, or one or None for each; needs ``enable_lora=True``.
            priority: One for all, or one for each; lower values run first. Needs ``scheduling_policy="priority"``.
        """
        with as_value_error():
            requests = self._requests(self._read(prompts), sampling_params, lora_request, priority)
        return self._run(requests, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> Iterator[RequestOutput]:
        """Continue each prompt like :meth:`generate`, and yield an output whenever a sample has new tokens.

        ``output_kind`` and ``stream_interval`` of its parameters decide what it holds and how often it comes. Ending
        the iterator early (``close``) aborts the rest.
        """
        with as_value_error():
            requests = self._requests(self._read(prompts), sampling_params, lora_request)
        return self._stream(requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: Turns in OpenAI's form (role, content), or a list of such lists. A part of the type ``image_url``
                holds an image: a data: URL, the path of a file, its bytes, or a picture of PIL.
            chat_template: Jinja source, or the path of a file with it, to use instead of the model's.
            add_generation_prompt: Whether the prompt ends where the assistant's turn begins.
            tools: Functions in OpenAI's form, for the template to describe.
            chat_template_kwargs: More names for the template.
            mm_processor_kwargs: Options of the processor of images and videos, such as ``max_pixels`` or ``fps``.
            lora_request: A LoRA adapter for all, or one or None for each; needs ``enable_lora=True``.
        """
        with as_value_error():
            encoded = self.llm_engine.chats.encode(
                as_conversations(messages),
                chat_template,
                tools,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=chat_template_kwargs,
                processor=mm_processor_kwargs,
            )
            requests = self._requests(encoded, sampling_params, lora_request)
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest continuations of each prompt; return them in the order of the prompts.

        Each step runs one request of one token for each beam, whose prefix hits the prefix cache.

        Args:
            prompts: One that is refused or fails does so alone, as in :meth:`generate`.
            params: ``beam_width`` may be at most half of ``max_logprobs``.
            concurrency_limit: Prompts that are searched at once; None: all.
        """
        with as_value_error():
            search = OfflineBeamSearch(
                self._builder, self.llm_engine.tokenizer, lambda requests: self._loop.run(requests, False)
            )
            return search.search(self._read(prompts), params, concurrency_limit, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: PoolingTaskName | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt; return the results in the order of the prompts.

        Args:
            prompts: As in :meth:`generate`, without embeddings.
            pooling_params: One for all, or one for each; None: as the model says.
            truncate_prompt_tokens: How many tokens of a longer prompt to keep, the first ones and the special ones
                around a text; -1: as many as the context, or the files of sentence-transformers, allow.
            pooling_task: ``embed``, ``classify``, ``score``, ``token_embed`` or ``token_classify``, unless the
                parameters name it.
            prompt_name: Of the prompt of the checkpoint's ``config_sentence_transformers.json`` before each text that
                becomes a vector; None: its default prompt, if it has one.
        """
        with as_value_error():
            texts = as_prompts(prompts)
            return self._pooling.encode(
                texts, pooling_params, pooling_task, truncate_prompt_tokens, use_tqdm, prompt_name
            )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt; the arguments are those of :meth:`encode`."""
        pooled = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            prompt_name=prompt_name,
        )
        return [with_outputs(each, lambda data: EmbeddingOutput(data.tolist())) for each in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the classes of each prompt; the arguments are those of :meth:`encode`."""
        pooled = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            pooling_task="classify",
        )
        return [with_outputs(each, lambda data: ClassificationOutput(data.tolist())) for each in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score one text against each of several, or pairs of texts: by a model that reads both at once, or by the
        cosine of their vectors if the model embeds.

        Args:
            data_1: One text, or as many as ``data_2`` has.
            data_2: The other texts.
            truncate_prompt_tokens: As in :meth:`encode`.
        """
        with as_value_error():
            return self._pooling.score(data_1, data_2, pooling_params, truncate_prompt_tokens, use_tqdm)

    def enqueue(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Add one prompt, whose output :meth:`next_finished` returns; return its request id."""
        with as_value_error():
            (request,) = self._builder.build(
                [read_prompt(prompt, self.llm_engine.tokenizer, self._media)], sampling_params
            )
        self._loop.enqueue(request)
        return request.output.request_id

    def enqueue_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> str:
        """Add one conversation, as :meth:`enqueue` does a prompt."""
        with as_value_error():
            encoded = self.llm_engine.chats.encode([messages])
            (request,) = self._builder.build(encoded, sampling_params)
        self._loop.enqueue(request)
        return request.output.request_id

    def next_finished(self) -> list[RequestOutput]:
        """Compute until some enqueued requests have ended, and return their outputs; empty if none are in flight.

        An output whose request failed has an ``error``.
        """
        return [request.output for request in self._loop.next_ended()]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's ``generation_config.json``, and ours for other parameters."""
        return self._builder.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Drop the KV blocks of earlier prompts. Returns whether it succeeded."""
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Forget the rows of images and sounds that were computed here."""
        self.llm_engine.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Forget the rows of images and sounds that wait in the engine; requests that need some get them again."""
        self.llm_engine.reset_encoder_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and release memory.

        Raises ``UtilityError`` for an unknown level or mode, and if asleep at another level.

        Args:
            level: 0 only pauses; 1 releases weights and KV cache, which :meth:`wake_up` restores; 2 releases both, and
                :meth:`reload_weights` must load weights before waking.
            mode: What happens to requests of other calls that are in flight: ``abort`` ends them, ``wait`` finishes
                those that have begun, ``keep`` lets them continue after waking.
        """
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore ``weights``, ``kv_cache``, or both (None); ``scheduling`` resumes what slept at level 0.

        After ``sleep(2)`` the weights come from :meth:`reload_weights`. Raises ``UtilityError`` if they are missing.
        """
        self.llm_engine.wake_up(tags)

    def reload_weights(self, path: str | Path | None = None) -> None:
        """Load the weights of another checkpoint of the same architecture, awake or asleep, and forget cached prefixes.

        Args:
            path: A checkpoint directory, a GGUF file or a hub id; None: the model that this object was made with.

        Raises ``ValueError`` if there is no such checkpoint, ``UtilityError`` if it does not fit or requests run.
        """
        self.llm_engine.reload_weights(path)

    def update_weights(self, tensors: "Mapping[str, Tensor]", *, mode: str | None = None) -> int:
        """Load weights that a trainer has in its memory, as :meth:`.LLMEngine.update_weights`, and return their
        number."""
        return self.llm_engine.update_weights(tensors, mode=mode)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start recording what the workers compute, which slows them down; needs ``profiler_dir``.

        Raises ``UtilityError`` without that directory, and while recording.

        Args:
            profile_prefix: The names of the files begin with it: letters, digits, ``.``, ``-`` and ``_``.
        """
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """Write the profile to ``profiler_dir``. Raises ``UtilityError`` if none is being recorded."""
        self.llm_engine.stop_profile()

    def collective_rpc(self, method: str, args: Sequence[object] = ()) -> list[object]:
        """Call ``profile``, ``resident_bytes`` or ``reload_weights`` on every worker; return the results by rank.

        ``reload_weights`` has at most one argument, as :meth:`reload_weights`.
        """
        return self.llm_engine.collective_rpc(method, args)

    def close(self) -> None:
        """Release the model and the KV cache. Idempotent; the object cannot be used afterwards."""
        self.llm_engine.close()

    def _run(self, requests: list[OfflineRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        self._loop.run(requests, use_tqdm)
        check_failures([request.error for request in requests])
        return [request.output for request in requests]

    def _stream(self, requests: list[OfflineRequest]) -> Iterator[RequestOutput]:
        live = requests
        num_failed = 0
        with self._loop.running([request for request in requests if not request.finished]):
            while live:
                if not any(request.output.finished for request in live):  # another call's steps may have ended some
                    self._loop.step()
                # Those that end while the caller has the iterator, in steps of another call, have news once more.
                left = [request for request in live if not request.output.finished]
                for request in live:
                    if request.error is not None:
                        num_failed += 1
                        if num_failed == len(requests):
                            raise request.error
                    yield from request.news()
                live = left

    def _read(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        return read_each(
            as_prompts(prompts), lambda prompt: read_prompt(prompt, self.llm_engine.tokenizer, self._media)
        )

    def _requests(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
        priority: int | Sequence[int] | None = None,
    ) -> list[OfflineRequest]:
        adapted = self.llm_engine.loras.apply(prompts, lora_request)
        return self._builder.build(adapted, sampling_params, priority, refuses_alone=True)
