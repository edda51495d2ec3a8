"""Holds what the hash worker knows of a request, and computes its log probabilities and pooled vectors.

They are as exact as its tokens, so that tests find any lost or moved one.
"""

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..data.core_params import CorePoolingParams, CoreSamplingParams, ModelPooling, PoolingTask
from ..data.embedding_rows import EmbedsSpan, MediaSpan
from ..data.messages import Logprobs
from ..data.scheduler_output import NewRequestData


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
