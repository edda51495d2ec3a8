"""Holds what the hash worker keeps of requests and their adapters, and computes their log probabilities and pooled
vectors, and the states of its layer that keeps one.

They are as exact as its tokens, so that tests find any lost or moved one. A slot holds a hash of all tokens that were
read: one that is wrong, stale or written twice gives another hash, and so another token. With a chunk of several tokens
the hash depends on where prompts are cut, as the results of a chunked kernel do.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..data.core_params import CorePoolingParams, CoreSamplingParams, ModelPooling, PoolingTask
from ..data.embedding_rows import EmbedsSpan, MediaSpan
from ..data.lora import LoraConfig, LoraInfo, read_adapter_files, read_rank
from ..data.messages import Logprobs
from ..data.scheduler_output import NewRequestData, SchedulerOutput, StateRun


def hash_logprobs(
    best: Sequence[int], taken: Sequence[int], top: int, extra: Sequence[int], vocab_size: int
) -> Logprobs:
    """Return the log probabilities of n positions.

    The token that the hash gives is the best; the token ``d`` ids after it, modulo the vocabulary, has rank ``d + 1``
    and the log probability ``-(d + 1) / 8``.

    Args:
        best: [n] the tokens that the hash gives.
        taken: [n] the tokens that were sampled, or those of the prompt.
        top: How many of the best tokens to list for each position.
        extra: Tokens to list after them.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    for token_id in best:
        listed = [(token_id + distance) % vocab_size for distance in range(top)] + list(extra)
        token_ids += listed
        logprobs += [-_rank(token_id, each, vocab_size) / 8 for each in listed]
    ranks = [_rank(*pair, vocab_size) for pair in zip(best, taken, strict=True)]
    return Logprobs([-rank / 8 for rank in ranks], ranks, top + len(extra), token_ids, logprobs)


def _rank(best: int, token_id: int, vocab_size: int) -> int:
    return (token_id - best) % vocab_size + 1


Floats = npt.NDArray[np.float32]
NUM_CLASSES = 2
_NUM_COLUMNS = 8


def hash_pooling(*, generates: bool, aligns: bool = False) -> ModelPooling:
    """Return what the hash worker pools: everything, or only times with a sound beside prompts (``aligns``)."""
    if aligns:
        return ModelPooling((PoolingTask.ALIGN,), frozenset((PoolingTask.ALIGN,)))
    by_token = frozenset(task for task in PoolingTask if task.is_by_token)
    tasks = tuple(task for task in PoolingTask if task is not PoolingTask.ALIGN)
    return ModelPooling(tasks, by_token, generates=generates, matryoshka=True, vector_size=_NUM_COLUMNS)


def hash_pooled(prefix: npt.NDArray[np.int32], params: CorePoolingParams) -> Floats:
    """Pool ``prefix`` [n, 2], which holds token ids and positions: a task by token hashes each row, others all rows."""
    if params.task is PoolingTask.ALIGN:  # a row for each token
        rows = np.arange(len(prefix), dtype=np.float32) - params.skipped_tokens
        return np.clip(rows, 0, params.aligned_rows - 1 if params.aligned_rows else None)
    is_vector = params.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    if params.task.is_by_token:
        logits = np.stack([_numbers(row) for row in prefix])
    else:
        logits = _numbers(prefix)
    if is_vector:
        return _activate_vector(logits[..., : params.dimensions], params)
    if params.task is PoolingTask.SCORE:
        score = logits[..., 0]
        return np.asarray(score if params.use_activation is False else 1 / (1 + np.exp(-score)), dtype=np.float32)
    classes: Floats = logits[..., :NUM_CLASSES]
    if params.use_activation is not False:
        classes = np.exp(classes)
        classes /= classes.sum(-1, keepdims=True)
    return classes


def _activate_vector(vectors: Floats, params: CorePoolingParams) -> Floats:
    if params.use_activation is False:
        return vectors
    normalized: Floats = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return normalized


def _numbers(rows: npt.NDArray[np.int32]) -> Floats:
    """Return [8] numbers in [-1, 1)."""
    digest = hashlib.blake2b(np.ascontiguousarray(rows, dtype="<i4").tobytes(), digest_size=4 * _NUM_COLUMNS).digest()
    return (np.frombuffer(digest, "<u4") / 2.0**31 - 1).astype(np.float32)


class HashRow:
    """Holds the state of a request between steps."""

    def __init__(
        self, req_id: str, token_ids: list[int], num_computed: int, params: CoreSamplingParams, block_size: int
    ) -> None:
        self.req_id = req_id
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed = num_computed
        self.params = params
        self.mark = 0
        """Changes what is cached of its tokens, and thus the tokens after them, by its adapter."""
        self.slots: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.cross_slots: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        """Those of the rows beside its prompt."""
        self._block_size = block_size

    @classmethod
    def of_new(cls, new: NewRequestData, block_size: int) -> "HashRow":
        token_ids = new.prompt_token_ids + new.output_token_ids
        row = cls(new.req_id, token_ids, new.num_computed_tokens, new.sampling_params, block_size)
        row.add_blocks(new.block_ids)
        return row

    def take_embeds(self, spans: list[EmbedsSpan]) -> None:
        """Replace the ids that prompt embeddings cover by hashes of their rows."""
        for span in spans:
            self.token_ids[span.position : span.position + len(span.rows)] = embeds_ids(span)

    def check_rows(self, media: list[MediaSpan], rows: list[EmbedsSpan], num_tokens: int) -> None:
        """Raise ``AssertionError`` unless these rows are exactly those of the next ``num_tokens`` tokens."""
        start, end = self.num_computed, self.num_computed + num_tokens
        wanted = [(max(span.position, start), min(span.end, end)) for span in media]
        wanted = [(first, last) for first, last in wanted if first < last]
        found = [(span.position, span.position + len(span.rows)) for span in rows]
        assert found == wanted, f"tokens {start} to {end} have rows at {found}, images at {wanted}"
        for span in media:
            cut = span.is_whole and span.position < end < span.end
            assert not cut, f"a chunk ends at token {end}, inside the image of {span.position} to {span.end}"

    def take_cross(
        self, block_ids: list[int], rows: list[EmbedsSpan], num_rows: int, cache: npt.NDArray[np.int32]
    ) -> None:
        """Note where the rows beside the prompt are cached, and write them there if they came with the step."""
        assert len(block_ids) == -(-num_rows // self._block_size), "a request has other blocks than its rows need"
        slots = np.array(block_ids, dtype=np.int32)[:, None] * self._block_size + np.arange(self._block_size)
        self.cross_slots = slots.ravel()[:num_rows].astype(np.int32)
        if rows:
            assert len(rows) == 1
            assert len(rows[0].rows) == num_rows, "a step has a part of the rows beside a prompt"
            cache[self.cross_slots] = cross_entries(rows[0].rows)

    def is_in_prompt(self, num_tokens: int) -> bool:
        """Return whether the step that just computed ``num_tokens`` began within the prompt."""
        return self.num_computed - num_tokens < self.num_prompt_tokens

    def add_blocks(self, block_ids: list[int]) -> None:
        if block_ids:
            first_slots = np.array(block_ids, dtype=np.int32)[:, None] * self._block_size
            added = first_slots + np.arange(self._block_size, dtype=np.int32)
            self.slots = np.concatenate((self.slots, added.ravel()))


def cross_entries(rows: Floats) -> npt.NDArray[np.int32]:
    """Return what the cache holds of rows [n, ...] beside a prompt: hashes, and places that no token has, [n, 2]."""
    hashes = [zlib.crc32(row.tobytes()) >> 1 for row in rows]
    return np.column_stack((hashes, -2 - np.arange(len(rows)))).astype(np.int32)


def embeds_ids(span: EmbedsSpan) -> list[int]:
    """Return the ids that stand for the rows of a span in the hashed prefix."""
    return [zlib.crc32(row.tobytes()) >> 1 for row in span.rows]


STATE_BYTES = 16
_EMPTY = 0xEE
"""Each byte of a slot that holds nothing which a request may read."""
_ALONE = b"alone"
"""Marks a single token that follows a state, which kernels compute in another form than a chunk of one token."""


def hash_run(state: bytes, tokens: npt.NDArray[np.int32], chunk: int) -> bytes:
    """Return the state after ``tokens`` [n, 2], ids and positions, that follow ``state``; b"": there is none before."""
    form = _ALONE if len(tokens) == 1 and state else b""
    for start in range(0, len(tokens), chunk):
        piece = np.ascontiguousarray(tokens[start : start + chunk], dtype="<i4").tobytes()
        mark = form if chunk > 1 else b""
        state = hashlib.blake2b(state + mark + piece, digest_size=STATE_BYTES).digest()
    return state


class HashStates:
    """Holds the slots, of which each begins with a hash."""

    def __init__(self, chunk: int, nbytes: int = STATE_BYTES) -> None:
        """``chunk`` and ``nbytes``: as in ``ModelInfo.state_chunk`` and ``ModelInfo.state_bytes``."""
        self.chunk = chunk
        self.nbytes = nbytes
        self.slots: npt.NDArray[np.uint8] = np.empty((0, nbytes), dtype=np.uint8)
        """[num_slots, nbytes]."""
        self._last: dict[str, list[bytes]] = {}  # of each request of the step: after its last known token, and drafts

    def allocate(self, num_slots: int, memory: memoryview | None = None) -> None:
        """Make slots, which hold nothing that a request may read, in ``memory`` if it is given."""
        shape = (num_slots, self.nbytes)
        if memory is None:
            self.slots = np.empty(shape, dtype=np.uint8)
        else:
            self.slots = np.frombuffer(memory, dtype=np.uint8, count=num_slots * self.nbytes).reshape(shape)
        self.clear()

    def clear(self) -> None:
        """Let the slots hold nothing, where they lie: transports go on to serve that memory."""
        self.slots[:] = _EMPTY

    def of(self, row: HashRow, num_drafts: int = 0) -> bytes:
        """Return the state of a request of the latest step after the last token that was known, and so many drafts."""
        return self._last[row.req_id][num_drafts]

    def compute(self, step: SchedulerOutput, rows: Mapping[str, HashRow], cache: npt.NDArray[np.int32]) -> None:
        """Compute the runs of a step, whose tokens lie in the cache."""
        runs = {req_id: list(found) for req_id, found in groupby(step.state_runs, lambda run: run.req_id)}
        assert list(runs) == list(step.num_scheduled_tokens), "the runs are those of other requests"
        _check_apart(runs)
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            row = rows[req_id]
            begin = row.num_computed - num_tokens
            assert (begin == 0) == (runs[req_id][0].read < 0), "a request begins from zero, and goes on from a state"
            states = list[bytes]()
            for run in runs[req_id]:
                tokens = cache[row.slots[begin : begin + run.num_tokens]]
                states += self._compute_run(run, tokens)
                begin += run.num_tokens
            assert begin == row.num_computed, "the runs have other tokens than the step"
            self._last[req_id] = states[-1 - len(step.draft_token_ids.get(req_id, [])) :]
        self._last = {req_id: self._last[req_id] for req_id in runs}

    def _compute_run(self, run: StateRun, tokens: npt.NDArray[np.int32]) -> list[bytes]:
        """Return the states after each chunk of a run."""
        state = self.slots[run.read, :STATE_BYTES].tobytes() if run.read >= 0 else b""
        if self.chunk == 1:
            states = list(accumulate(tokens, lambda state, token: hash_run(state, token[None], 1), initial=state))[1:]
        else:
            states = [hash_run(state, tokens, self.chunk)]
        self.slots[run.written, :STATE_BYTES] = np.frombuffer(states[-1], dtype=np.uint8)
        return states


def _check_apart(runs: Mapping[str, list[StateRun]]) -> None:
    """Check that the kernels may compute all requests at the same time: none touches what another one writes."""
    writers = {run.written: req_id for req_id, found in runs.items() for run in found}
    for req_id, found in runs.items():
        touched = {slot for run in found for slot in (run.read, run.written)}
        assert all(writers.get(slot, req_id) == req_id for slot in touched), "two requests share a slot that is written"


class HashLoras:
    """Checks that every request that is computed finds its adapter in a slot."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._loaded: set[bytes] = set()
        self._slots: list[bytes] = []
        self._of_requests: dict[str, bytes] = {}  # preempted ones included

    def load(self, path: Path) -> LoraInfo:
        """Read an adapter. Raises ``ValueError``."""
        files = read_adapter_files(path)
        rank = read_rank(files.config, self._config.max_lora_rank)
        self._loaded.add(files.digest)
        return LoraInfo(files.digest, rank)

    def drop(self, digest: bytes) -> None:
        """Forget an adapter."""
        self._loaded.discard(digest)

    def begin(self, step: SchedulerOutput) -> None:
        """Learn of the adapters of a step's requests, and of the slots."""
        for req_id in step.finished_req_ids:
            self._of_requests.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            if new.adapter:
                self._of_requests[new.req_id] = new.adapter
        if step.lora_slots is not None:
            self._slots = step.lora_slots
            assert len(self._slots) <= self._config.max_loras
            assert self._loaded.issuperset(self._slots)
        if self._of_requests:
            used = {self._of_requests.get(req_id, b"") for req_id in step.num_scheduled_tokens} - {b""}
            assert used.issubset(self._slots), "a request is computed whose adapter has no slot"

    def mark_of(self, req_id: str) -> int:
        """Return the mark of a request's adapter."""
        return adapter_mark(self._of_requests.get(req_id, b""))


def adapter_mark(digest: bytes) -> int:
    """Return what is combined with each cached token of requests with this adapter; 0 for the base model."""
    return zlib.crc32(digest) >> 2 if digest else 0
