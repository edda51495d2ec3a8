"""The persistent batch: the worker's state of every request between steps, from which each step gathers its arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.core_params import CorePoolingParams, CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput

from ..attention.cross_backend import StepCross
from ..attention.states import StatePlan
from ..pooling.pooler import PooledPrompt, PooledRows
from ..sampler.host.logits_processors import make_logits_processors
from ..sampler.host.logprobs import LogprobRows
from ..sampler.host.plugged_processors import LogitsPlugin, PluggedRows
from .batch_arrays import BlockTable, Gathered, RowChanges, StepArrays, StepRows, make_gatherer, make_kernel_sampler
from .expected_tokens import UNKNOWN_TOKEN, Places
from .media_rows import CrossRows, MediaRows
from .prompt_rows import PromptEmbeds, PromptLogprobRows, TokenRows, mark, only_tokens, replaced_ranges

Ints = npt.NDArray[np.int64]
_NONE: Mapping[str, list[int]] = MappingProxyType({})
_NO_ROWS: Mapping[str, list[EmbedsSpan]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Holds what the model computes in one step: R requests with T tokens in all, in the order of the schedule."""

    req_ids: list[str]
    rows: Ints
    """[R]: rows of the input batch; the same array while the same requests go on in them."""
    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T]"""
    cu_query_lens: npt.NDArray[np.int32]
    """[R + 1]: the index at which each request's tokens begin."""
    seq_lens: npt.NDArray[np.int32]
    """[R]: how many tokens have their KV after the step."""
    block_tables: npt.NDArray[np.int32]
    """[R, blocks of the longest], as :class:`BlockTable` holds them."""
    slot_mapping: Ints
    """[T], or [groups of layers, T] if there are several: the slot to which each token's KV is written."""
    sampled: Ints
    """Indices in [0, R) of requests whose known tokens are all computed after the step: these draw a token."""
    embeds: Sequence[TokenRows] = ()
    """Embeddings that replace those of ``token_ids``."""
    drafts: Mapping[str, list[int]] = field(default_factory=dict)
    """Drafts by request of the step: its last tokens here, which are verified and not yet its own."""
    states: StatePlan | None = None
    """The slots that the step reads and writes; None: no layer keeps a state."""
    cross: StepCross | None = None
    """What the requests have beside their prompts; None: nothing."""
    rope: Ints | None = None
    """Rotary positions, where they are not ``positions``: see :meth:`~.media_rows.MediaRows.rope`."""
    limits: Ints | None = None
    """[T]: the last position that each token sees in layers that show it its image; None: its own."""

    @property
    def most_drafts(self) -> int:
        """Return how many drafts the request with the most has."""
        return max(map(len, self.drafts.values()), default=0)

    def num_logit_rows(self) -> Ints:
        """Return how many rows of logits each request of ``sampled`` has with its drafts, [S]."""
        drafts, req_ids = self.drafts, self.req_ids
        return np.array([1 + len(drafts.get(req_ids[index], ())) for index in self.sampled.tolist()], dtype=np.int64)

    def rows_to_verify(self, last_rows: npt.NDArray[np.integer]) -> Ints:
        """Return the rows of the step whose logits are needed to verify its drafts: of each request of ``sampled`` its
        last row, in ``last_rows`` [S], after those before its drafts. The rows of a request are next to each other."""
        counts = self.num_logit_rows()
        ends = np.cumsum(counts)
        return np.arange(ends[-1]) + np.repeat(last_rows + 1 - ends, counts)


@dataclass(frozen=True, slots=True)
class _Request:
    """Holds what outlives the row, because a preempted request comes back with its tokens and new blocks only."""

    params: CoreSamplingParams
    num_prompt_tokens: int
    prompt_embeds: list[EmbedsSpan]
    adapter: bytes
    pooling: CorePoolingParams | None
    media: list[MediaSpan]


class InputBatch:
    """Holds rows of token ids and block tables. A request keeps its row from its first step until it ends or is
    preempted, so a step changes only what is new. No row moves; a step gathers the rows that it computes."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        num_blocks: int = 1 << 31,
        num_cross_blocks: int = 0,
        plugins: Sequence[LogitsPlugin] = (),
    ) -> None:
        """``num_blocks``: those of the cache. ``num_cross_blocks``: those of a request for what stands beside its
        prompt. ``plugins`` change logits of requests that ask for it."""
        self._plugins = plugins
        self._num_cross_blocks = num_cross_blocks
        self.block_table = BlockTable(max_num_seqs, max_model_len, block_size, num_groups, num_blocks)
        # Zeroed memory is mapped when it is touched, so room for the longest request costs nothing until it is used.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        """The tokens of all rows, [max_num_seqs, max_model_len], as they are at any later time."""
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_owned_blocks = np.zeros(max_num_seqs, dtype=np.int64)  # with nothing foreign behind the tokens
        self._num_owners = np.zeros(max_num_seqs, dtype=np.int64)  # requests that have got the row
        self._changes: RowChanges | None = None
        self.max_num_seqs = max_num_seqs
        """How many rows there are."""
        self._gatherer = make_gatherer(self.token_ids, self._num_computed, self._num_tokens, self.block_table)
        self._gathered: Gathered | None = None
        self._inputs: StepInputs  # those of ``_gathered``
        self._kernel_sampler = make_kernel_sampler(self.token_ids, self._num_tokens, self._num_prompt_tokens)
        self.clear()

    def clear(self) -> None:
        """Forget every request."""
        self.plugged = [PluggedRows(plugin) for plugin in self._plugins]
        """Those of the logits processors that are plugins, in order."""
        self.logits_processors = make_logits_processors(self.plugged)
        self.logprobs = LogprobRows()
        self.prompt_logprobs = PromptLogprobRows()
        self.prompt_embeds = PromptEmbeds()
        self.media = MediaRows(self.max_num_seqs)
        self._cross = CrossRows(self.max_num_seqs, self._num_cross_blocks) if self._num_cross_blocks else None
        self.pooled = PooledRows()
        self.routed: set[int] = set()
        """Rows of requests that ask which experts computed their tokens."""
        self.adapters: dict[int, bytes] = {}
        """The digests of LoRA adapters, by rows of requests that have one."""
        self._extra_rows: set[int] = set()  # those of requests that ask for any of the above
        self._requests: dict[str, _Request] = {}
        self._row_of: dict[str, int] = {}
        self._params: dict[int, CoreSamplingParams] = {}
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self._step_rows: StepRows | None = None  # of the last step; None once a row was added or removed

    def __len__(self) -> int:
        """Return how many rows are in use."""
        return len(self._row_of)

    @property
    def gathered(self) -> StepArrays | None:
        """Where the arrays of a step lie that has not more tokens than they; None: each step's lie elsewhere."""
        return None if self._gatherer is None else self._gatherer.arrays

    def watch(self) -> RowChanges:
        """Return what collects the changes of rows and block tables from now on; no request may have a row yet."""
        self._changes = self.block_table.changes = RowChanges()
        return self._changes

    def has_row(self, row: int) -> bool:
        """Return whether a request has this row."""
        return row in self._params

    def params_of(self, row: int) -> CoreSamplingParams:
        """Return the sampling parameters of a row's request."""
        return self._params[row]

    def update(self, step: SchedulerOutput) -> None:
        """Apply what changed since the last step."""
        for req_id in step.finished_req_ids:
            self._requests.pop(req_id, None)
            self._remove_row(req_id)
        for req_id in step.preempted_req_ids:
            self._remove_row(req_id)
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = _Request(
                new.sampling_params,
                len(new.prompt_token_ids),
                new.prompt_embeds,
                new.adapter,
                new.pooling_params,
                new.media,
            )
            token_ids = new.prompt_token_ids + new.output_token_ids
            self._add_row(new.req_id, token_ids, new.block_ids, new.num_computed_tokens)
        if step.scheduled_cached_reqs.req_ids:
            self._update_cached(step.scheduled_cached_reqs)
        if step.cross_block_ids:
            assert self._cross is not None, "the model has nothing beside prompts"
            self._cross.take(step.cross_block_ids, self._row_of)

    def _update_cached(self, cached: CachedRequestData) -> None:
        if cached.resumed_token_ids:
            self._resume(cached)
            return
        row_of, table = self._row_of, self.block_table
        step_rows = self._step_rows
        # One assignment for all rows: two calls for each decoding request had been a measurable part of a step.
        if step_rows is not None and step_rows.req_ids == cached.req_ids:
            self._num_computed[step_rows.rows] = cached.num_computed_tokens
        else:
            self._num_computed[[row_of[req_id] for req_id in cached.req_ids]] = cached.num_computed_tokens
        if any(cached.new_block_ids):
            for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if block_ids:
                    table.append(row_of[req_id], block_ids)

    def _resume(self, cached: CachedRequestData) -> None:
        """Apply the changes of requests some of which were preempted and have no row."""
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, block_ids, num_computed in columns:
            token_ids = cached.resumed_token_ids.get(req_id)
            if token_ids is not None:
                self._add_row(req_id, token_ids, block_ids, num_computed)
            else:
                row = self._row_of[req_id]
                self.block_table.append(row, block_ids)
                self._num_computed[row] = num_computed

    def _add_row(self, req_id: str, token_ids: list[int], block_ids: Sequence[int], num_computed: int) -> None:
        assert req_id not in self._row_of, f"request {req_id} already has a row"
        row = self._row_of[req_id] = self._free_rows.pop()
        self._step_rows = None
        # A row may go to another request while a token for its former one is still on its way; the count keeps them
        # apart.
        self._num_owners[row] += 1
        if self._changes is not None:
            self._changes.add_row(row)
        self.token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_computed[row] = num_computed
        # A block that was loaded in part may end with KV of another request, so it counts as not owned.
        self._num_owned_blocks[row] = num_computed // self.block_table.block_size
        self.block_table.replace(row, block_ids)
        request = self._requests[req_id]
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        self._params[row] = request.params
        if self._add_extras(row, request, token_ids):
            self._extra_rows.add(row)

    def _add_extras(self, row: int, request: _Request, token_ids: list[int]) -> bool:
        """Note what a request asks for beside the plain sampling of tokens. Returns whether it asks for any."""
        params, embeds, media = request.params, request.prompt_embeds, request.media
        # Embeddings of the prompt are no tokens that a processor could count.
        counted = only_tokens(token_ids, replaced_ranges(embeds, media)) if embeds or media else token_ids
        num_prompt_tokens = request.num_prompt_tokens - (len(token_ids) - len(counted))
        asks = self.logits_processors.add(row, params, counted, num_prompt_tokens)
        if params.logprobs is not None:
            self.logprobs[row] = params
        if params.prompt_logprobs is not None:
            self.prompt_logprobs.add(row, params, token_ids, request.num_prompt_tokens)
        if params.return_routed_experts:
            self.routed.add(row)
        if request.adapter:
            self.adapters[row] = request.adapter
        if embeds:
            self.prompt_embeds.add(row, embeds, self._num_computed.item(row))
        if media and self._cross is None:
            self.media.add(row, media)
            for span in media:
                # What stands for an image may lie above the vocabulary, and its row replaces its embedding anyway.
                self.token_ids[row, span.position : span.end] = 0
        if request.pooling is not None:
            # Pooling must not slow generation down: such a request is scheduled like any prompt, and one token more
            # than it has keeps each step from sampling for it.
            self.pooled[row] = PooledPrompt(request.pooling, len(token_ids))
            self._num_tokens[row] += 1
        reports = params.logprobs is not None or params.prompt_logprobs is not None or params.return_routed_experts
        return asks or reports or bool(request.adapter or embeds or media) or request.pooling is not None

    def _remove_row(self, req_id: str) -> None:
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._step_rows = None
            del self._params[row]
            self._free_rows.append(row)
            # Most requests ask for nothing of these: their end costs one look-up instead of seven.
            if row in self._extra_rows:
                self._remove_extras(row)

    def _remove_extras(self, row: int) -> None:
        self._extra_rows.remove(row)
        self.logits_processors.remove(row)
        self.logprobs.pop(row, None)
        self.prompt_logprobs.pop(row, None)
        self.prompt_embeds.remove(row)
        if self.media.images:
            self.media.remove(row)
        self.pooled.pop(row, None)
        self.routed.discard(row)
        self.adapters.pop(row, None)

    def prepare(
        self,
        num_scheduled_tokens: Mapping[str, int],
        drafts: Mapping[str, list[int]] = _NONE,
        media_rows: Mapping[str, list[EmbedsSpan]] = _NO_ROWS,
    ) -> StepInputs:
        """Gather the arrays of a step that computes so many tokens of each of these requests, ``drafts`` included.
        ``media_rows``: those of images that it needs, by request."""
        step_rows, req_ids = self._step_rows, list(num_scheduled_tokens)
        if step_rows is None or step_rows.req_ids != req_ids:
            step_rows = self._step_rows = StepRows.find(req_ids, self._row_of, self._params)
        for req_id, token_ids in drafts.items():
            # They lie behind the request's tokens, where drawn tokens replace them.
            row = self._row_of[req_id]
            end = self._num_tokens.item(row)
            self.token_ids[row, end : end + len(token_ids)] = token_ids
        counts, rows = num_scheduled_tokens.values(), step_rows.rows
        if self._gatherer is not None and not self.prompt_embeds.live:
            gathered = self._gatherer.gather(step_rows, counts)
            if gathered is not self._gathered or drafts:
                self._gathered = None if drafts else gathered
                self._inputs = StepInputs(step_rows.req_ids, rows, *gathered, drafts=drafts)
            if self._cross is not None:
                return replace(self._inputs, cross=self._cross.step(step_rows.req_ids, rows, media_rows, self.pooled))
            if not self.media.images:
                return self._inputs
            lengths = np.fromiter(counts, dtype=np.int64, count=len(rows))
            # Copied: a recorded step reads rotary positions from where these lie.
            inputs = replace(self._inputs, positions=self._inputs.positions.copy())
            inputs = self._turned(inputs, self._num_computed[rows], lengths)
        else:
            lengths = np.fromiter(counts, dtype=np.int64, count=len(rows))
            inputs = self.gather(step_rows.req_ids, rows, self._num_computed[rows], lengths, drafts)
            if self.prompt_embeds.live:
                self.prompt_embeds.settle(rows, inputs.seq_lens)
            if self._cross is not None:
                return replace(inputs, cross=self._cross.step(step_rows.req_ids, rows, media_rows, self.pooled))
            if not self.media.images:
                return inputs
        starts = inputs.seq_lens.astype(np.int64) - lengths
        found = self.media.step(inputs.req_ids, rows, starts, lengths, media_rows)
        return replace(inputs, embeds=[*inputs.embeds, *found.embeds], limits=found.limits)

    def _turned(self, inputs: StepInputs, starts: Ints, lengths: Ints) -> StepInputs:
        """Return a step with the rotary positions of its tokens, if images make them others than their indices."""
        rope = self.media.rope(inputs.rows, starts, lengths, inputs.positions)
        return inputs if rope is None else replace(inputs, rope=rope)

    def gather(
        self, req_ids: list[str], rows: Ints, starts: Ints, lengths: Ints, drafts: Mapping[str, list[int]] = _NONE
    ) -> StepInputs:
        """Gather the arrays of a step that computes ``lengths`` tokens from position ``starts`` on of these requests,
        which have these rows of the batch; all [R]. Raises ``AssertionError`` for tokens that a request cannot have or
        has no blocks for, and for none."""
        seq_lens = starts + lengths
        room = np.minimum(self.block_table.num_slots_of(rows), self.token_ids.shape[1])
        # Not `seq_lens > room`: the sum of a start near 2^63 and its length is negative.
        if lengths.min(initial=1) < 1 or starts.min(initial=0) < 0 or (lengths > room - starts).any():
            raise AssertionError(f"{lengths} tokens from positions {starts} on, where {req_ids} have room for {room}")
        if lengths.max(initial=1) == 1:  # a token of each
            cu_query_lens = np.arange(len(rows) + 1, dtype=np.int32)
            positions, token_rows = starts, rows
        else:
            cu_query_lens = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(lengths, out=cu_query_lens[1:])
            positions = np.arange(cu_query_lens[-1]) + np.repeat(starts - cu_query_lens[:-1], lengths)
            token_rows = np.repeat(rows, lengths)
        inputs = StepInputs(
            req_ids=req_ids,
            rows=rows,
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            cu_query_lens=cu_query_lens,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self.block_table.gather(rows),
            slot_mapping=self.block_table.slots(token_rows, positions),
            sampled=np.flatnonzero(seq_lens >= self._num_tokens[rows]),
            embeds=self.prompt_embeds.gather(rows, starts, lengths, cu_query_lens) if self.prompt_embeds.live else (),
            drafts=drafts,
        )
        return self._turned(inputs, starts, lengths) if self.media.images else inputs

    def known_tokens(self, req_id: str) -> npt.NDArray[np.int32]:
        """Return the prompt and output of a request that has a row, with marks for tokens that have rows in place of
        ids; see :func:`.prompt_rows.mark`."""
        row, request = self._row_of[req_id], self._requests[req_id]
        token_ids = self.token_ids[row, : self._num_tokens[row]]
        if not (request.prompt_embeds or request.media):
            return token_ids
        return mark(token_ids, replaced_ranges(request.prompt_embeds, request.media))

    def num_known_tokens(self, req_id: str) -> int:
        """Return how many tokens of prompt and output a request has, which must have a row."""
        return self._num_tokens.item(self._row_of[req_id])

    def output_tokens(self, req_id: str) -> npt.NDArray[np.int32] | None:
        """Return the tokens of a request after its prompt; None: it has no row."""
        if (row := self._row_of.get(req_id)) is None:
            return None
        return self.token_ids[row, self._num_prompt_tokens[row] : self._num_tokens[row]]

    def num_tokens(self, row: int) -> int:
        """Return how many tokens of prompt and output a row has."""
        return self._num_tokens.item(row)

    def num_slots(self, row: int) -> int:
        """Return how many tokens of a row its blocks and the context hold."""
        return min(self.block_table.num_slots(row), self.token_ids.shape[1])

    def place_drafts(self, rows: Ints, positions: Ints, token_ids: Ints) -> None:
        """Put a token behind those of each of these rows, for :meth:`gather`; drawn tokens replace it."""
        self.token_ids[rows, positions] = token_ids

    def take_foreign_tails(self, step: StepInputs) -> Ints:
        """Return the indices in [0, R) of requests in whose last block foreign values follow their tokens.

        They are those that begin a block in this step or got part of one from elsewhere; the caller zeroes the tails.
        """
        num_blocks = -(-step.seq_lens // self.block_table.block_size)
        # What an earlier owner left may be NaN, and 0 * NaN is NaN in attention that masks by weights of 0. Zeroing
        # only these tails cost 8 decodes nothing (109 µs), zeroing in each gather 17 to 37 µs.
        is_foreign = num_blocks > self._num_owned_blocks[step.rows]
        self._num_owned_blocks[step.rows] = num_blocks
        return np.flatnonzero(is_foreign)

    @property
    def only_draws(self) -> bool:
        """Return whether no request asks for changed logits or for log probabilities."""
        return not (self.logits_processors or self.logprobs)

    def sampling(self, rows: Ints) -> tuple[list[CoreSamplingParams], Ints]:
        """Return the parameters of these rows [S], and the output indices [S] of their next tokens."""
        step_rows, params = self._step_rows, self._params
        wanted = (
            step_rows.params if step_rows is not None and rows is step_rows.rows else [params[x] for x in rows.tolist()]
        )
        return wanted, self.output_indices(rows)

    def output_indices(self, rows: Ints) -> Ints:
        """Return the output indices [S] of the next tokens of these rows [S]."""
        return self._num_tokens[rows] - self._num_prompt_tokens[rows]

    def are_greedy(self, rows: Iterable[int]) -> bool:
        """Return whether these rows take the tokens of the largest logits."""
        return all(self._params[row].temperature == 0.0 for row in rows)

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append drawn tokens to a row, as :meth:`append` does, while no request asks for changed logits."""
        end = self._num_tokens.item(row)
        kept = token_ids[: self.token_ids.shape[1] - end]
        self.token_ids[row, end : end + len(kept)] = kept
        self._num_tokens[row] = end + len(kept)

    def append(self, rows: Ints, token_ids: Ints) -> None:
        """Append a drawn token to each of these rows, for the next step to compute.

        The token at the last position of the context is not kept, because no token follows it.
        """
        ends = self._num_tokens[rows]
        has_room = ends < self.token_ids.shape[1]
        if not has_room.all():
            rows, token_ids, ends = rows[has_room], token_ids[has_room], ends[has_room]
        self.token_ids[rows, ends] = token_ids
        self._num_tokens[rows] = ends + 1
        self.logits_processors.append(rows, token_ids)

    def append_drawn(self, places: Ints, logits: Tensor) -> Ints | None:
        """Draw a token for each of the requests ``places`` [n] of the step that was prepared last, from logits
        [n, vocab], and append it; no request may ask for changed logits.

        Returns the tokens [n], which hold until the next call; None: no kernel can draw them, and nothing was appended.
        """
        if self._kernel_sampler is None or self._step_rows is None:
            return None
        return self._kernel_sampler.append(self._step_rows, places, logits)

    def expect_tokens(self, rows: Ints) -> Places:
        """Append a token that only the device knows to each of these rows, as :meth:`append` does with known ones.

        Returns where the tokens belong. No row may be one whose logits the host changes by its output.
        """
        places = Places(rows.copy(), self._num_tokens[rows], self._num_owners[rows])
        has_room = places.positions < self.token_ids.shape[1]
        self.token_ids[rows[has_room], places.positions[has_room]] = UNKNOWN_TOKEN
        self._num_tokens[rows[has_room]] += 1
        return places

    def place_tokens(self, places: Places, token_ids: Ints) -> None:
        """Write the tokens [S] of an earlier step to their places, unless the row is another request's by now."""
        is_due = self._num_owners[places.rows] == places.owners
        is_due &= places.positions < self.token_ids.shape[1]
        rows, token_ids = places.rows[is_due], token_ids[is_due]
        self.token_ids[rows, places.positions[is_due]] = token_ids
        self.logits_processors.append(rows, token_ids)
