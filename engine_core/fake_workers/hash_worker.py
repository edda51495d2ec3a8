"""A worker without a model: the next token is a hash of the prefix, which is read back from a paged cache.

The cache holds token ids and positions instead of keys and values, and is accessed through the block tables only: a
wrong block, slot, position or order changes the tokens.

Of a checkpoint it reads only the sizes. Its LoRA adapters change the tokens of their requests.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom.gguf.gguf_file import is_gguf, read_gguf
from tokenloom.process.control_groups import resident_bytes

from ..data.config import EngineConfig
from ..data.core_params import CorePoolingParams, CoreSamplingParams
from ..data.embedding_rows import EmbedsSpan, MediaSpan
from ..data.handshake import WarmUp
from ..data.kv_groups import NULL_BLOCK, KVCacheConfig
from ..data.lora import LoraInfo
from ..data.messages import Logprobs
from ..data.model_info import FreedMemory, MediaTraits, ModelInfo, slots_offset
from ..data.parallel_config import ExpertPeers
from ..data.scheduler_output import CachedRequestData, GrammarOutput, ModelRunnerOutput, SchedulerOutput, StateBases
from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_transport import KVPool, KVRegion
from .hash_row import (
    STATE_BYTES,
    HashLoras,
    HashRow,
    HashStates,
    adapter_mark,
    cross_entries,
    hash_logprobs,
    hash_pooled,
    hash_pooling,
    hash_run,
)


class CheckpointSizes(NamedTuple):
    """Holds what a checkpoint states about its tokens."""

    vocab_size: int
    max_model_len: int | None
    """The longest context; None if the checkpoint states none."""
    experts_per_token: int = 0
    """As in ``ModelInfo``, if every layer has experts."""
    hidden_size: int | None = None
    """Of a model with a tower, whose rows are so wide; None: it has none."""
    levels: int = 1
    """As in ``MediaTraits``."""
    cross_rows: int = 0
    """As in ``MediaTraits``."""


def read_sizes(path: Path) -> CheckpointSizes:
    """Read ``config.json`` of a directory, or the head of a GGUF file. Raises ``ValueError`` if it names no sizes."""
    if is_gguf(path):
        file = read_gguf(path)
        embeddings = file.tensors.get("token_embd.weight")
        if embeddings is None:
            raise ValueError(f"{path.name} has no tensor token_embd.weight: it holds no language model")
        length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
        return CheckpointSizes(embeddings.shape[0], length)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    if config.get("model_type") == "whisper":
        sizes = (config["vocab_size"], config["max_target_positions"])
        return CheckpointSizes(*sizes, hidden_size=config["d_model"], cross_rows=config["max_source_positions"])
    text = config if "vocab_size" in config else config.get("text_config", {})
    if "vocab_size" not in text:
        raise ValueError(f"{path / 'config.json'} must state vocab_size")
    experts = text.get("num_experts_per_tok", 0) * text.get("num_hidden_layers", 1)
    tower = config.get("vision_config") or config.get("audio_config") or {}
    hidden_size = (config.get("text_config") or config).get("hidden_size") if tower else None
    levels = 1 + len(tower.get("deepstack_visual_indexes") or ())
    return CheckpointSizes(text["vocab_size"], text.get("max_position_embeddings"), experts, hidden_size, levels)


DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_MAX_MODEL_LEN = 4096
HIDDEN_SIZE = 8
"""Columns of prompt embeddings."""
_BYTES_PER_TOKEN = 8
_AVAILABLE_BYTES = 64 << 20

TokenIds = npt.NDArray[np.intp]


class HashWorker:
    """Implements ``Worker``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
        experts_per_token: int = 0,
        state_chunk: int = 0,
        state_bytes: int = STATE_BYTES,
        cross_rows: int = 0,
    ) -> None:
        """``vocab_size``, ``max_model_len``, ``experts_per_token`` (see ``ModelInfo``) and ``cross_rows`` (see
        ``MediaTraits``) are used only if no model is configured. ``state_chunk`` gives it a layer that keeps a state,
        for which it reports ``state_bytes`` (see there); 0: it has none. Raises ``ValueError``."""
        self._loras = HashLoras(config.lora)
        if config.speculative is not None and config.speculative.rejection_sample_method != "strict":
            raise ValueError("rejection_sample_method: the hash worker has no probabilities; use strict")
        self._config = config.worker
        self._block_size = config.cache.block_size
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._experts_per_token = experts_per_token
        self._hidden_size, self._levels = HIDDEN_SIZE, 1
        self._cross_rows = cross_rows
        self._states = HashStates(state_chunk, state_bytes) if state_chunk else None
        self._state_bytes = state_bytes if state_chunk else 0
        self._bases = StateBases(is_strict=state_chunk > 1) if state_chunk else None
        self._rows: dict[str, HashRow] = {}
        self._embeds: dict[str, list[EmbedsSpan]] = {}
        self._media: dict[str, list[MediaSpan]] = {}
        self._params: dict[str, CoreSamplingParams] = {}  # preempted requests included
        self._pooling: dict[str, CorePoolingParams] = {}  # preempted requests included
        self._executed: list[str] = []
        self._prompt_logprobs: dict[str, Logprobs] = {}  # of the step executed last
        self._drafts: dict[str, list[int]] = {}
        self._num_drafts_wanted: dict[str, int] = {}
        self._proposed: dict[str, list[int]] = {}  # after the step sampled last
        self._cache = np.empty((0, 2), dtype=np.int32)
        self._memory: PoolMemory | None = None

    def load_model(self) -> ModelInfo:
        if self._config.model:
            sizes = read_sizes(Path(self._config.model))
            self._vocab_size = sizes.vocab_size
            self._max_model_len = sizes.max_model_len or self._max_model_len
            self._experts_per_token = sizes.experts_per_token
            self._hidden_size, self._levels = sizes.hidden_size or HIDDEN_SIZE, sizes.levels
            self._cross_rows = sizes.cross_rows
        return ModelInfo(
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            kv_bytes_per_token=_BYTES_PER_TOKEN,
            kv_layout=self._kv_layout,
            numerics="hash" if self._states is None else f"hash/state{self._states.chunk}",
            hidden_size=self._hidden_size,
            experts_per_token=self._experts_per_token,
            pooling=hash_pooling(generates=self._config.runner != "pooling", aligns=self._cross_rows > 0),
            state_bytes=self._state_bytes,
            state_chunk=1 if self._states is None else self._states.chunk,
            media=self._media_traits(),
        )

    def _media_traits(self) -> MediaTraits | None:
        if self._config.language_model_only:
            return None
        if self._cross_rows:
            return MediaTraits(("audio",), cross_rows=self._cross_rows)
        return MediaTraits(("image", "audio", "video"), self._levels)

    def determine_available_memory(self) -> int:
        return _AVAILABLE_BYTES

    @property
    def _kv_layout(self) -> str:
        states = f"/state/{self._state_bytes}" if self._states is not None else ""
        return f"hash/int32/2/{self._block_size}{states}"

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, memory: PoolMemory | None = None) -> WarmUp:
        num_slots = kv_cache.num_blocks * self._block_size
        behind = slots_offset(num_slots * _BYTES_PER_TOKEN)
        nbytes = behind + kv_cache.num_state_slots * self._state_bytes
        self._memory = memory or PoolMemory.allocate(nbytes, shared=False)
        # No token has the id -1, so a slot that is read before it was written changes the hash, and with it all later
        # tokens.
        self._cache = np.frombuffer(self._memory.buffer, dtype=np.int32, count=2 * num_slots).reshape(num_slots, 2)
        self._cache[:] = -1
        if self._states is not None:
            self._states.allocate(kv_cache.num_state_slots, self._memory.buffer[behind:])
        return WarmUp()

    def kv_pool(self) -> KVPool:
        assert self._memory is not None, "initialize_kv_cache comes first"
        block_bytes = self._block_size * _BYTES_PER_TOKEN
        num_blocks = len(self._cache) // self._block_size
        regions: tuple[KVRegion, ...] = (KVRegion(0, block_bytes),)
        num_slots = 0
        if self._states is not None:
            num_slots = len(self._states.slots)
            regions += (KVRegion(slots_offset(num_blocks * block_bytes), self._state_bytes, is_state=True),)
        return KVPool(self._memory, regions, num_blocks, self._kv_layout, num_slots)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._wait(scheduler_output)
        scheduler_output = self._with_drafts(scheduler_output)
        self._update_rows(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        # As in a layer of a model, all rows are written before any is read.
        self._drafts, self._num_drafts_wanted = scheduler_output.draft_token_ids, scheduler_output.num_drafts_wanted
        for req_id, num_tokens in scheduled.items():
            self._write(self._rows[req_id], num_tokens, self._drafts.get(req_id, []))
        if self._states is not None:
            self._states.compute(scheduler_output, self._rows, self._cache)
        self._executed = list(scheduled)
        self._prompt_logprobs = {
            req_id: self._prompt_logprobs_of(self._rows[req_id], num_tokens)
            for req_id, num_tokens in scheduled.items()
            if self._rows[req_id].is_in_prompt(num_tokens) and self._params[req_id].prompt_logprobs is not None
        }

    def _with_drafts(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a step with the drafts that it verifies, if its plan does not name them."""
        if not step.defers_drafts:
            return step
        return step.with_drafts(lambda req_id: len(self._rows[req_id].token_ids), self._proposed, self._bases)

    def execute_dummy_batch(self) -> None:
        """Write a token to the first place of ``NULL_BLOCK``, as a model's step would."""
        time.sleep(self._config.step_seconds)
        self._cache[NULL_BLOCK * self._block_size] = 0

    def listen_experts(self, host: str) -> str:
        """Return an address at which no process listens: a hash needs nothing of other ranks."""
        return f"{host}:0"

    def join_experts(self, peers: ExpertPeers) -> None:
        """Do nothing."""

    def leave_experts(self) -> None:
        """Do nothing."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        allowed = allowed_tokens(grammar, self._vocab_size)
        tokens = [
            []
            if req_id in self._pooling
            else self._sample(self._rows[req_id], self._drafts.get(req_id, []), allowed.get(req_id))
            for req_id in self._executed
        ]
        logprobs = {
            req_id: self._logprobs_of(self._rows[req_id], token_ids)
            for req_id, token_ids in zip(self._executed, tokens, strict=True)
            if token_ids and self._params[req_id].logprobs is not None
        }
        drafts = {
            req_id: self._propose(self._rows[req_id], self._num_drafts_wanted[req_id], len(token_ids))
            for req_id, token_ids in zip(self._executed, tokens, strict=True)
            if token_ids and req_id in self._num_drafts_wanted
        }
        pooled = self._pool() if self._pooling else {}
        self._proposed = drafts
        return ModelRunnerOutput(
            self._executed,
            tokens,
            logprobs,
            self._prompt_logprobs,
            draft_token_ids=drafts.copy(),
            pooled=pooled,
            num_verified={req_id: len(each) for req_id, each in self._drafts.items()},
        )

    def sleep(self, level: int) -> FreedMemory:
        assert self._memory is not None, "initialize_kv_cache comes first"
        self._memory.discard()
        return FreedMemory(kv_cache=self._memory.nbytes)

    def wake_up(self, tags: Sequence[str]) -> None:
        if "kv_cache" in tags:
            self._cache[:] = -1
            if self._states is not None:
                self._states.clear()

    def check_weights(self, path: str) -> None:
        """Check that a model could load the checkpoint."""
        vocab_size = read_sizes(Path(path)).vocab_size
        if vocab_size != self._vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size} in the checkpoint and {self._vocab_size} in the engine; they must be equal"
            )

    def reload_weights(self, path: str) -> None:
        """Check the checkpoint: this worker has no weights."""
        self.check_weights(path)

    def load_lora(self, path: str) -> LoraInfo:
        return self._loras.load(Path(path))

    def drop_lora(self, digest: bytes) -> None:
        self._loras.drop(digest)

    def profile(self, start: bool, prefix: str = "") -> None:
        raise ValueError("this worker has nothing to profile")

    def check_health(self) -> None:
        """Do nothing: this worker computes nothing that could fail."""

    def resident_bytes(self) -> int:
        return resident_bytes()

    def shutdown(self) -> None:
        self._rows.clear()

    def seconds_of(self, scheduler_output: SchedulerOutput) -> float:
        """Return the configured duration of such a step."""
        per_token = self._config.token_seconds * scheduler_output.total_num_scheduled_tokens
        return self._config.step_seconds + per_token

    def _wait(self, scheduler_output: SchedulerOutput) -> None:
        if seconds := self.seconds_of(scheduler_output):
            time.sleep(seconds)

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        self._loras.begin(scheduler_output)
        for req_id in scheduler_output.finished_req_ids + scheduler_output.preempted_req_ids:
            self._rows.pop(req_id, None)
        for req_id in scheduler_output.finished_req_ids:
            self._params.pop(req_id, None)
            self._embeds.pop(req_id, None)
            self._media.pop(req_id, None)
            self._pooling.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._params[new.req_id] = new.sampling_params
            self._rows[new.req_id] = HashRow.of_new(new, self._block_size)
            self._rows[new.req_id].mark = self._loras.mark_of(new.req_id)
            if new.pooling_params is not None:
                self._pooling[new.req_id] = new.pooling_params
            if new.prompt_embeds:
                self._embeds[new.req_id] = new.prompt_embeds
                self._rows[new.req_id].take_embeds(new.prompt_embeds)
            if new.media:
                self._media[new.req_id] = new.media
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        if self._cross_rows:
            for req_id, block_ids in scheduler_output.cross_block_ids.items():
                rows = scheduler_output.media_rows.get(req_id, [])
                self._rows[req_id].take_cross(block_ids, rows, self._cross_rows, self._cache)
        elif self._media:
            self._take_media_rows(scheduler_output)

    def _take_media_rows(self, scheduler_output: SchedulerOutput) -> None:
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if (media := self._media.get(req_id)) is not None:
                rows = scheduler_output.media_rows.get(req_id, [])
                self._rows[req_id].check_rows(media, rows, num_tokens)
                self._rows[req_id].take_embeds(rows)

    def _update_cached(self, cached: CachedRequestData) -> None:
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, block_ids, num_computed in columns:
            if req_id in cached.resumed_token_ids:
                token_ids = cached.resumed_token_ids[req_id]
                self._rows[req_id] = HashRow(req_id, token_ids, num_computed, self._params[req_id], self._block_size)
                self._rows[req_id].take_embeds(self._embeds.get(req_id, []))
                self._rows[req_id].mark = self._loras.mark_of(req_id)
            row = self._rows[req_id]
            row.add_blocks(block_ids)
            row.num_computed = num_computed

    def _write(self, row: HashRow, num_tokens: int, drafts: list[int]) -> None:
        positions = np.arange(row.num_computed, row.num_computed + num_tokens)
        token_ids = (row.token_ids[row.num_computed :] + drafts)[:num_tokens]
        assert 1 <= len(token_ids) == num_tokens, "no tokens are scheduled, or more than there are"
        assert not drafts or num_tokens == 1 + len(drafts), "drafts are scheduled before the tokens that they follow"
        self._cache[row.slots[positions]] = np.column_stack((np.array(token_ids, dtype=np.int64) ^ row.mark, positions))
        row.num_computed += num_tokens

    def _sample(self, row: HashRow, drafts: list[int], allowed: list[TokenIds] | None) -> list[int]:
        """Sample the next token and, as long as the drafts equal what was sampled, those after them."""
        if row.num_computed < len(row.token_ids):
            return []
        sampled: list[int] = []
        most = 1 + len(drafts) if allowed is None else len(allowed)
        while len(sampled) < most:
            # Not from `row.token_ids`, which would be simpler: read back through the block table, a wrong block, slot
            # or position shows as another token. So tests of the engine find errors of bookkeeping without a model.
            prefix = self._cache[row.slots[: len(row.token_ids)]]
            state = self._beside(row, len(sampled))
            if allowed is None:
                token_id = _next_token(prefix, self._vocab_size, state)
            else:
                choices = allowed[len(sampled)]
                token_id = int(choices[_next_token(prefix, len(choices), state)])
            row.token_ids.append(token_id)
            sampled.append(token_id)
            if drafts[len(sampled) - 1 : len(sampled)] != [token_id]:
                break
        return sampled

    def _beside(self, row: HashRow, num_drafts: int = 0) -> bytes:
        """Return what the next token of a request follows from beside its cached tokens: the state after them, and what
        the cache holds of the rows beside its prompt."""
        state = b"" if self._states is None else self._states.of(row, num_drafts)
        return state + self._cache[row.cross_slots].tobytes() if self._cross_rows else state

    def _pool(self) -> dict[str, npt.NDArray[np.float32]]:
        """Pool the requests of the step whose prompts are complete."""
        rows = {req_id: self._rows[req_id] for req_id in self._executed if req_id in self._pooling}
        return {
            req_id: hash_pooled(self._cache[row.slots[: len(row.token_ids)]], self._pooling[req_id])
            for req_id, row in rows.items()
            if row.num_computed == len(row.token_ids)
        }

    def _propose(self, row: HashRow, count: int, num_sampled: int) -> list[int]:
        """Return drafts of the tokens that follow the ``num_sampled`` ones of the step; a hash of the prefix decides
        which of them are wrong."""
        num_tokens = len(row.token_ids)
        prefix = np.empty((num_tokens + count, 2), dtype=np.int32)
        prefix[:num_tokens, 0], prefix[:, 1] = np.array(row.token_ids) ^ row.mark, np.arange(num_tokens + count)
        state = self._beside(row, num_sampled - 1)
        for end in range(num_tokens, num_tokens + count):
            if self._states is not None:
                state = hash_run(state, prefix[end - 1 : end], self._states.chunk)
            is_wrong = zlib.crc32(prefix[:end].tobytes()) % 1000 >= self._config.draft_accuracy * 1000
            token_id = _next_token(prefix[:end], self._vocab_size, state)
            prefix[end, 0] = (token_id + is_wrong) % self._vocab_size ^ row.mark
        drafts: list[int] = (prefix[num_tokens:, 0] ^ row.mark).tolist()
        return drafts

    def _logprobs_of(self, row: HashRow, token_ids: list[int]) -> Logprobs:
        """Return the log probabilities of the tokens that were just sampled."""
        top, extra = row.params.logprobs or 0, row.params.logprob_token_ids or ()
        first = len(row.token_ids) - len(token_ids)
        states = [self._beside(row, index) for index in range(len(token_ids))]
        best = [self._best(row, first + index, state) for index, state in enumerate(states)]
        return hash_logprobs(best, token_ids, top, extra, self._vocab_size)

    def _prompt_logprobs_of(self, row: HashRow, num_tokens: int) -> Logprobs:
        """Return the log probabilities of the prompt tokens that follow those of the step; of what the cache holds
        only, because the states before the last one are gone."""
        first = row.num_computed - num_tokens + 1
        last = min(row.num_computed, row.num_prompt_tokens - 1)
        beside = self._cache[row.cross_slots].tobytes() if self._cross_rows else b""
        best = [self._best(row, position, beside) for position in range(first, last + 1)]
        top = row.params.prompt_logprobs or 0
        return hash_logprobs(best, row.token_ids[first : last + 1], top, (), self._vocab_size)

    def _best(self, row: HashRow, position: int, state: bytes = b"") -> int:
        return _next_token(self._cache[row.slots[:position]], self._vocab_size, state)


def allowed_tokens(grammar: GrammarOutput | None, vocab_size: int) -> dict[str, list[TokenIds]]:
    """Return, in ascending order, the tokens among which each request with a grammar samples its next tokens."""
    allowed: dict[str, list[TokenIds]] = {}
    if grammar is not None:
        for req_id, row in zip(grammar.req_ids, grammar.allowed(vocab_size), strict=True):
            allowed.setdefault(req_id, []).append(np.flatnonzero(row))
    return allowed


def _next_token(prefix: npt.NDArray[np.int32], vocab_size: int, state: bytes = b"") -> int:
    """Hash ``prefix`` [n, 2], which holds token ids and positions, and the state after it."""
    digest = hashlib.blake2b(np.ascontiguousarray(prefix, dtype="<i4").tobytes() + state, digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    adapter: bytes = b"",
    state_chunk: int = 0,
    beside: npt.NDArray[np.float32] | None = None,
) -> list[int]:
    """Return what a worker with an unbounded cache would produce after this prompt, with an adapter if its digest is
    given. ``state_chunk``: the worker's. ``beside``: the rows that stand beside the prompt; None: there are none."""
    token_ids = list(prompt_token_ids)
    state, num_read = b"" if beside is None else cross_entries(beside).tobytes(), 0
    for _ in range(num_tokens):
        marked = np.array(token_ids) ^ adapter_mark(adapter)
        prefix = np.column_stack((marked, np.arange(len(token_ids)))).astype(np.int32)
        if state_chunk:
            state, num_read = hash_run(state, prefix[num_read:], state_chunk), len(prefix)
        token_ids.append(_next_token(prefix, vocab_size, state))
    return token_ids[len(prompt_token_ids) :]
