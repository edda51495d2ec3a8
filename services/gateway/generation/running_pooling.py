"""Holds a pooling call in work: sends its prompts to output processors, a limited number at a time."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.tracing import CURRENT
from tokenloom.v1 import inference_pb2, output_processor_pb2, tokenizer_pb2, types_pb2

from ..mesh.output_pool import Cancel, OutputPool
from ..mesh.pooled_outputs import PooledOutputs, PooledResult
from ..records.pooling_input import PoolingInput
from .admission import AdmittedRequest
from .preparation import RequestContext

MAX_RESULT_BYTES = 256 << 20
"""Limits the results of one call: 2,048 vectors of 32,768 numbers, or 65,536 token vectors of 1,024."""
MOST_AT_ONCE = 256
"""Prompts of one call that are in work at the same time: enough to fill the batches of several engines."""
_SENT_AT_ONCE = 16
_QUERIES_AT_ONCE = 64
"""Queries whose token vectors engines hold for one call at the same time."""
_MAX_ROUNDS = 3
"""How often a query is sent whose engine lost it."""


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
    ) -> None:
        """``priority``: with which it runs."""
        job = pooling.job
        self.model = context.model if job.adapter is None else job.adapter.name
        self.request_id = context.draw_id()
        self._num_queries = pooling.num_queries
        self._prompts = prompts
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._common = output_processor_pb2.Submit(
            tenant=job.tenant.name,
            priority=priority,
            pooling_params=pooling.params,
            prompt=types_pb2.Prompt(
                cache_salt=job.cache_salt, adapter=b"" if job.adapter is None else job.adapter.digest
            ),
            trace_headers=CURRENT.get(),
        )
        self._draw_id = context.draw_id
        self._outputs = PooledOutputs(len(prompts), MAX_RESULT_BYTES, self._note_end)
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
        for number, index in enumerate(indices):
            # A call may have 2,048 inputs. Sent at once, they would fill the limits of the gateway, the output
            # processors and the engines' queues for every other client.
            await self._outputs.wait(most_at_once - 1)
            submit = self._submit(index, seconds_left())
            if interactions is not None:
                query_id, num_documents = interactions[index]
                late = submit.pooling_params.late_interaction
                late.query_id, late.num_documents = query_id, num_documents
            self._outputs.num_live += 1
            self._cancels[index] = pool.submit(submit, self._outputs, index)
            if number % _SENT_AT_ONCE == _SENT_AT_ONCE - 1:
                await asyncio.sleep(0)
        await self._outputs.wait(0)

    def _submit(self, index: int, seconds_left: float) -> output_processor_pb2.Submit:
        prompt = self._prompts[index]
        submit = output_processor_pb2.Submit()
        submit.CopyFrom(self._common)
        submit.request_id = f"{self.request_id}-{index}"
        submit.prompt.token_ids.extend(prompt.token_ids)
        submit.block_hash_prefixes.extend(prompt.block_hash_prefixes)
        submit.pooling_params.first_part_tokens = prompt.first_part_tokens
        submit.timeout.FromNanoseconds(max(round(seconds_left * 1e9), 0))
        return submit
