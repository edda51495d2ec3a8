"""Holds a pooling call in work: encodes its prompts, and sends a limited number at a time to output processors."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenloom.request import errors, packed_ids, validation
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.prompt_embeds import FIELD as EMBEDS_FIELD
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.telemetry.tracing import CURRENT
from tokenloom.v1 import inference_pb2, output_processor_pb2, tokenizer_pb2, types_pb2

from ..mesh.output_pool import Cancel, OutputPool
from ..mesh.pooled_outputs import PooledOutputs, PooledResult
from ..mesh.tokenizer_client import MAX_WAITING, TokenizerClient
from ..records.generate_request import Chat, EmbeddedPrompt, SoundPrompt, sound_of
from ..records.pooling_input import PoolingInput, task_name, task_names
from .admission import POOLED_AT_ONCE, AdmittedRequest
from .encoded_prompt import unpack
from .preparation import RequestContext, cache_salt, check_sizes

MAX_RESULT_BYTES = 256 << 20
"""Limits the results of one call: 2,048 vectors of 32,768 numbers, or 65,536 token vectors of 1,024."""
MOST_AT_ONCE = 256
"""Prompts of one call that are in work at the same time: enough to fill the batches of several engines."""
_BESIDE_SECONDS = 1.0
_MAX_TOKENS = 1 << 30
"""Of these prompts, and of one more of each call: more than all bodies together hold."""
_SENT_AT_ONCE = 16
_QUERIES_AT_ONCE = 64
"""Queries whose token vectors engines hold for one call at the same time."""
_MAX_ROUNDS = 3
"""How often a query is sent whose engine lost it."""


class PoolingStage(FairStage):
    """Lets the prompts of all calls take turns, charged by their tokens: a quarter as many at a time while answers are
    generated beside them, and for a second after."""

    def __init__(self, num_places: int = POOLED_AT_ONCE) -> None:
        # With 256 of each of four calls, another tenant's completions waited behind 1,024 texts at each service.
        super().__init__(num_places, "prompts to pool", max_waiting=MAX_WAITING, max_cost=_MAX_TOKENS)
        self._num_kept_beside = num_places - num_places // 4
        self._beside_until = 0.0

    def look(self, now: float, *, is_beside: bool) -> None:
        """Follow whether answers are generated. ``now``: seconds of the event loop."""
        # Each token waits for what every process does with the texts of a step. 64 instead of 256 of them brought the
        # median of another tenant's answers from 174 to 125 ms, and cost a third of the texts per second.
        if is_beside:
            self._beside_until = now + _BESIDE_SECONDS
        self.num_kept = self._num_kept_beside if now < self._beside_until else 0


class RunningPooling:
    """Holds a pooling call in work, and its results.

    Attributes:
        model: Name of the model or adapter.
        request_id: Random.
        finished: Nothing: the ends of prompts are not kept.
        ttft_seconds: None: nothing is generated.
    """

    finished: Mapping[int, output_processor_pb2.RequestFinished] = {}
    ttft_seconds = None

    def __init__(
        self,
        pooling: PoolingInput,
        prompts: Sequence[tokenizer_pb2.TokenizedPrompt],
        context: RequestContext,
        priority: int,
        stage: PoolingStage,
    ) -> None:
        """``priority``: with which it runs. ``stage``: of all calls."""
        request = pooling.request
        self.model = context.model if request.adapter is None else request.adapter.name
        self.request_id = context.draw_id()
        self._num_queries = pooling.num_queries
        self._prompts = prompts
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._common = output_processor_pb2.Submit(
            tenant=request.tenant.name,
            priority=priority,
            pooling_params=pooling.params,
            prompt=types_pb2.Prompt(
                cache_salt=cache_salt(request), adapter=b"" if request.adapter is None else request.adapter.digest
            ),
            trace_headers=CURRENT.get(),
            preferred_engine=context.beside_engine,
        )
        self._sound = sound_of(request.prompts)
        self._draw_id = context.draw_id
        self._stage = stage
        self._outputs = PooledOutputs(len(prompts), MAX_RESULT_BYTES, self._note_end, self._leave)
        self._turns: dict[int, int] = {}  # the tokens of each prompt that has a turn
        self._cancels: dict[int, Cancel] = {}
        self._admitted: AdmittedRequest | None = None
        self._num_ends = self._num_begun = 0

    @property
    def results(self) -> Sequence[PooledResult]:
        """The results by prompt, after :meth:`run`; without those of queries, whose vectors stay at their engines."""
        results = self._outputs.results[self._num_queries :]
        assert all(result is not None for result in results)
        return [result for result in results if result is not None]

    @property
    def num_ended(self) -> int:
        """Prompts that have a result."""
        return sum(result is not None for result in self._outputs.results)

    @property
    def weights_version(self) -> str:
        """The weights that computed all results; empty for engines that have none."""
        return self._outputs.weights_version

    @property
    def usage(self) -> inference_pb2.Usage:
        """The tokens of all prompts."""
        return inference_pb2.Usage(prompt_tokens=self._num_prompt_tokens, cached_tokens=self._outputs.cached_tokens)

    async def run(self, pool: OutputPool, admitted: AdmittedRequest, seconds_left: Callable[[], float]) -> None:
        """Send the prompts and wait for all results. Raises what ended the call early.

        ``admitted``: says how many prompts may be in work at once, and counts their ends.
        """
        self._admitted, most_at_once = admitted, admitted.num_outputs
        if self._num_queries:
            await self._interact(pool, most_at_once, seconds_left)
            return
        await self._send(range(len(self._prompts)), pool, most_at_once, seconds_left)
        if missing := self._outputs.results.count(None):
            raise errors.Internal(f"{missing} prompts ended without a result")

    def close(self) -> None:
        """Cancel what still runs."""
        for cancel in self._cancels.values():
            cancel()
        self._cancels.clear()
        for index in list(self._turns):
            self._leave(index)

    async def _interact(self, pool: OutputPool, most_at_once: int, seconds_left: Callable[[], float]) -> None:
        """Send queries, then the documents that are scored by the engines which hold them."""
        for start in range(0, self._num_queries, _QUERIES_AT_ONCE):
            queries = range(start, min(start + _QUERIES_AT_ONCE, self._num_queries))
            for _ in range(_MAX_ROUNDS):
                pairs = {query: left for query in queries if (left := self._unscored(query))}
                if not pairs:
                    break
                # A new id in each round: the engine follows from the id, so the query goes to another one than the
                # engine that lost it.
                ids = {query: self._draw_id() for query in pairs}
                parts = {query: (ids[query], len(documents)) for query, documents in pairs.items()}
                await self._send(parts, pool, most_at_once, seconds_left, parts)
                parts = {each: (ids[query], 0) for query, documents in pairs.items() for each in documents}
                await self._send(parts, pool, most_at_once, seconds_left, parts)
            else:
                if any(map(self._unscored, queries)):
                    raise errors.Unavailable("The engine that held the query became unavailable; retry.")

    def _leave(self, index: int) -> None:
        """End the turn of a prompt that is in work no more, if it has one."""
        if (num_tokens := self._turns.pop(index, None)) is not None:
            self._stage.end(self._common.tenant, num_tokens)

    def _note_end(self) -> None:
        """Count one more prompt that has ended, and report it to the admission in proportion: that counts as
        many outputs as are in work at once, and a call may have more prompts."""
        assert self._admitted is not None
        self._num_ends += 1
        if self._num_ends * self._admitted.num_outputs >= (self._num_begun + 1) * len(self._prompts):
            self._admitted.begin_output(self._num_begun)
            self._num_begun += 1

    def _unscored(self, query: int) -> list[int]:
        """Return the documents of a query that have no score: all documents belong to a single query, otherwise one to
        each."""
        documents = range(self._num_queries, len(self._prompts))
        own = documents if self._num_queries == 1 else documents[query : query + 1]
        return [each for each in own if self._outputs.results[each] is None]

    async def _send(
        self,
        indices: Iterable[int],
        pool: OutputPool,
        most_at_once: int,
        seconds_left: Callable[[], float],
        interactions: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        """Send prompts and wait for their ends. ``interactions``: the id of the query of each, and its documents."""
        assert self._admitted is not None
        for number, index in enumerate(indices):
            # A call may have 2,048 inputs. Sent at once, they would fill the limits of the gateway, the output
            # processors and the engines' queues for every other client.
            await self._outputs.wait(most_at_once - 1)
            num_tokens = len(self._prompts[index].token_ids) + 1
            self._stage.look(asyncio.get_running_loop().time(), is_beside=self._admitted.is_beside_answers)
            await self._stage.begin(self._common.tenant, num_tokens)
            self._turns[index] = num_tokens
            submit = self._submit(index, seconds_left())
            if interactions is not None:
                query_id, num_documents = interactions[index]
                late = submit.pooling_params.late_interaction
                late.query_id, late.num_documents = query_id, num_documents
            self._outputs.num_live += 1
            self._cancels[index] = pool.submit(submit, self._outputs, index, self._sound)
            if number % _SENT_AT_ONCE == _SENT_AT_ONCE - 1:
                await asyncio.sleep(0)
        await self._outputs.wait(0)

    def _submit(self, index: int, seconds_left: float) -> output_processor_pb2.Submit:
        prompt = self._prompts[index]
        submit = output_processor_pb2.Submit()
        submit.CopyFrom(self._common)
        submit.request_id = f"{self.request_id}-{index}"
        submit.prompt.token_ids.extend(prompt.token_ids)
        if self._sound is not None:
            submit.prompt.media.extend(prompt.media)
        submit.block_hash_prefixes.extend(prompt.block_hash_prefixes)
        submit.pooling_params.first_part_tokens = prompt.first_part_tokens
        submit.pooling_params.skipped_tokens = prompt.skipped_tokens
        submit.timeout.FromNanoseconds(max(round(seconds_left * 1e9), 0))
        return submit


_TEXTS_PER_CALL = 64
"""Texts of one call to a tokenizer; a call with more inputs is spread over the tokenizers."""
_CHECKED_AT_ONCE = 64

Prompts = Sequence[tokenizer_pb2.TokenizedPrompt]


def check_task(params: types_pb2.PoolingParams, limits: types_pb2.ModelLimits) -> None:
    """Raise ``InvalidArgument`` for what the model does not serve."""
    if params.task not in limits.pooling_tasks:
        name = task_name(params.task)
        raise errors.InvalidArgument(
            f"the model does not serve the task {name}; its pooling tasks are: {task_names(limits)}", "model"
        )
    if params.HasField("dimensions"):
        if not limits.matryoshka:
            raise errors.InvalidArgument("dimensions: the model's vectors cannot be shortened", "dimensions")
        if not params.dimensions:
            raise errors.InvalidArgument("dimensions must be at least 1", "dimensions")


async def encode(pooling: PoolingInput, tokenizers: TokenizerClient, limits: types_pb2.ModelLimits) -> Prompts:
    """Return the token ids of every prompt, checked. Raises ``InvalidArgument`` naming the field."""
    request = pooling.request
    keep = _num_kept(pooling, limits)
    info = tokenizers.info
    is_cut = bool(keep) or (pooling.makes_vectors and info is not None and info.max_sentence_tokens > 0)
    if info is not None and not is_cut:
        check_sizes(request, info.max_token_bytes, limits)
    prompts = await _encode(pooling, tokenizers, keep)
    for start in range(0, len(prompts), _CHECKED_AT_ONCE):
        for prompt in prompts[start : start + _CHECKED_AT_ONCE]:
            if prompt.packed_token_ids:
                await _unpack(prompt, limits, request.prompt_field)
            validation.check_pooling_prompt(prompt.token_ids, limits, field=request.prompt_field)
        await asyncio.sleep(0)
    return prompts


async def _unpack(prompt: tokenizer_pb2.TokenizedPrompt, limits: types_pb2.ModelLimits, field: str) -> None:
    ids = packed_ids.ids_of(prompt)
    if len(ids) > limits.max_model_len:  # refused for its length before its items are looked at
        validation.check_pooling_prompt(range(len(ids)), limits, field=field)
    await unpack(prompt, ids)


async def _encode(pooling: PoolingInput, tokenizers: TokenizerClient, keep: int) -> Prompts:
    request = pooling.request
    if pooling.prompt_name and not _takes_prompt(pooling):
        raise errors.InvalidArgument("prompt_name is for texts that become vectors; leave it out", "prompt_name")
    if isinstance(request.prompts, Chat):
        encoding = tokenizers.encode_chat(request.prompts, hash_salt=cache_salt(request), tenant=request.tenant.name)
        chat = (await encoding).prompt
        return [_cut(packed_ids.ids_of(chat), pooling, keep) if keep else chat]
    texts: list[str] = []
    lists: list[tokenizer_pb2.TokenizedPrompt] = []
    for number, prompt in enumerate(request.prompts):
        if isinstance(prompt, str):
            texts.append(prompt)
        elif isinstance(prompt, SoundPrompt):
            lists.append(prompt.prompt)
        elif isinstance(prompt, EmbeddedPrompt):
            raise errors.InvalidArgument(f"{EMBEDS_FIELD} is not supported for pooling", EMBEDS_FIELD)
        else:
            lists.append(_cut(narrow_token_ids(request.prompt_field, prompt), pooling, keep))
        if number % _CHECKED_AT_ONCE == 0:
            await asyncio.sleep(0)
    if texts and lists:
        raise errors.InvalidArgument(
            f"{request.prompt_field} must be texts or lists of token ids, not both", request.prompt_field
        )
    if lists:
        return lists
    calls = [
        tokenizers.encode(
            texts[start : start + _TEXTS_PER_CALL],
            add_special_tokens=request.add_special_tokens,
            hash_salt=cache_salt(request),
            second_texts=pooling.second_texts[start : start + _TEXTS_PER_CALL],
            max_tokens=keep,
            keep_first=pooling.keep_first,
            prompt_name=pooling.prompt_name if pooling.makes_vectors else None,
            takes_packed_ids=True,
            tenant=request.tenant.name,
        )
        for start in range(0, len(texts), _TEXTS_PER_CALL)
    ]
    return [prompt for response in await asyncio.gather(*calls) for prompt in response.prompts]


def _takes_prompt(pooling: PoolingInput) -> bool:
    prompts = pooling.request.prompts
    return pooling.makes_vectors and not isinstance(prompts, Chat) and all(isinstance(each, str) for each in prompts)


def _cut(token_ids: Sequence[int], pooling: PoolingInput, keep: int) -> tokenizer_pb2.TokenizedPrompt:
    if keep and len(token_ids) > keep:
        token_ids = token_ids[:keep] if pooling.keep_first else token_ids[-keep:]
    return tokenizer_pb2.TokenizedPrompt(token_ids=token_ids)


def _num_kept(pooling: PoolingInput, limits: types_pb2.ModelLimits) -> int:
    """Return how many tokens of a prompt are kept; 0: all."""
    keep = pooling.request.truncate_prompt_tokens
    if keep is None:
        return 0
    if keep == 0 or keep > limits.max_model_len:
        raise errors.InvalidArgument(
            f"truncate_prompt_tokens must be -1 or from 1 to the model's context of {limits.max_model_len}",
            "truncate_prompt_tokens",
        )
    return keep if keep > 0 else limits.max_model_len
