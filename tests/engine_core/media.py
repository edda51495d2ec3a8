"""Makes requests with images for the hash worker, and plays the client that brings their rows."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tests.engine_core.helpers import VOCAB_SIZE, make_request
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan, RowsKey
from tokenloom.engine_core.data.messages import ArrivedRows, EngineCoreOutput, EngineCoreRequest, RowsWanted
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE, expected_tokens

PLACEHOLDER = 3
ROW_BYTES = 4 * HIDDEN_SIZE


def rows_of(key: RowsKey) -> npt.NDArray[np.float32]:
    """Return the rows that stand for a key: what an encoder would compute."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    return np.random.default_rng(seed).random((key.num_rows, key.levels * HIDDEN_SIZE), dtype=np.float32)


def image(position: int, num_rows: int, key: str = "image", *, is_whole: bool = False) -> MediaSpan:
    return MediaSpan(position, num_rows, 0, key.encode(), num_rows, is_whole)


def make_media(
    request_id: str, *spans: MediaSpan, length: int = 30, max_tokens: int = 5, **fields: object
) -> EngineCoreRequest:
    """Ids from 10 on, and those of a placeholder where there are images."""
    prompt = list(range(10, 10 + length))
    for span in spans:
        prompt[span.position : span.end] = [PLACEHOLDER] * span.num_tokens
    request = make_request(request_id, prompt, max_tokens, **fields)  # type: ignore[arg-type]
    request.media = list(spans)
    return request


def expected(request: EngineCoreRequest, vocab_size: int = VOCAB_SIZE, state_chunk: int = 0) -> list[int]:
    """Return the tokens of a request whose every row is right. ``state_chunk``: the worker's."""
    prompt = list(request.prompt_token_ids)
    for span in request.media:
        whole = rows_of(span.rows_key)
        rows = whole[span.row_offset : span.row_offset + span.num_tokens]
        prompt[span.position : span.end] = embeds_ids(EmbedsSpan(span.position, rows))
    return expected_tokens(prompt, request.sampling_params.max_tokens, vocab_size, state_chunk=state_chunk)


class RowClient:
    """Brings rows that a core asks for: at once, or when :meth:`bring` is called."""

    def __init__(self, core: EngineCore, *, at_once: bool = True) -> None:
        self.core = core
        self.asked: list[RowsWanted] = []
        self.pending: list[RowsWanted] = []
        self._at_once = at_once
        self.rows_of_piece = 1000
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            self.core.add_request(request)

    def step(self) -> None:
        outputs = self.core.step()
        for output in outputs.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output
        self.asked += outputs.rows_wanted
        for wanted in outputs.rows_wanted:
            if wanted.number not in [each.number for each in self.pending]:
                self.pending.append(wanted)
        if self._at_once:
            self.bring()

    def bring(self, count: int | None = None, rows: Callable[[RowsKey], npt.NDArray[np.float32]] = rows_of) -> None:
        """Bring the rows of the first ``count`` images that were asked for."""
        wanted, self.pending = self.pending[:count], [] if count is None else self.pending[count:]
        for each in wanted:
            whole = rows(each.key)
            for first in range(0, len(whole), self.rows_of_piece):
                piece = whole[first : first + self.rows_of_piece]
                self.core.scheduler.take_rows(ArrivedRows(each.key, each.number, first, piece))

    def finish(self, max_steps: int = 1000) -> None:
        """Step until the core is idle, or waits for rows that are not brought."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def check(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Check that each of these requests has ended with the right tokens, and that no rows are held."""
        for request in requests:
            assert self.tokens[request.request_id] == expected(request), request.request_id
        assert self.core.scheduler.media is not None
        assert self.core.scheduler.media.num_bytes == 0
        assert not self.core.scheduler.media.parked


def keys_of(wanted: Sequence[RowsWanted]) -> list[str]:
    return [each.key.key.decode() for each in wanted]
