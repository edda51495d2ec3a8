"""A small core over the hash worker whose evicted blocks go to a file."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, tokens_of
from tests.engine_core.kv_cache.grouped_hash_worker import GroupedHashWorker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.messages import EngineCoreOutput, SessionTurn
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.offload_tier import TierLoad

BLOCK_SIZE = 4
BLOCK_BYTES = 8 * BLOCK_SIZE


class OffloadingCore:
    """A core, and the events that let it continue."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 64,
        policy: str = "recompute",
        executor: str = "uniproc",
        windows: Sequence[int | None] = (),
        state_chunk: int = 0,
        state_bytes: int = STATE_BYTES,
        num_states: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
        **config: object,
    ) -> None:
        """``windows``: those of the groups of layers, if there are several. ``state_chunk``, ``state_bytes``: of the
        layer that keeps a state, if there is one, with ``num_states`` slots; the file has room for as many states as
        for blocks. ``clock``: nanoseconds."""
        base = make_config(
            block_size=BLOCK_SIZE,
            async_scheduling=executor != "uniproc",
            **config,  # type: ignore[arg-type]
        )
        nbytes = slots * (BLOCK_BYTES + state_bytes * (state_chunk > 0))
        kv = KVConfig(offload_path=str(directory), offload_bytes=nbytes, policy=policy)
        cache = msgspec.structs.replace(base.cache, state_memory_bytes=num_states * state_bytes or None)
        self.config = msgspec.structs.replace(base, kv=kv, cache=cache)
        worker = HashWorker(
            self.config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=state_chunk, state_bytes=state_bytes
        )
        if windows:
            worker = GroupedHashWorker(self.config, windows)
        self.core = EngineCore(self.config, EXECUTORS[executor](worker), make_core_kv(self.config, ()), clock=clock)
        self._news = threading.Event()
        self.core.on_update(self._news.set)

    def run(
        self,
        *prompts: Sequence[int],
        max_tokens: int = 4,
        session: SessionTurn | None = None,
        settles: bool = False,
    ) -> list[list[int]]:
        """Tokens of each prompt, all asked for at once. ``session``: of which they are turns. ``settles``: each step
        begins when all that was saved before is written."""
        for index, prompt in enumerate(prompts):
            self.core.add_request(make_request(str(index), prompt, max_tokens, session=session))
        outputs: dict[str, list[EngineCoreOutput]] = {}
        while self.core.has_requests():
            if settles:
                self.settle()
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
                assert not output.error
        return [tokens_of(outputs[str(index)]) for index in range(len(prompts))]

    def step(self) -> list[EngineCoreOutput]:
        """One step, after a load if nothing else can be done."""
        self._news.clear()
        if not self.core.has_work():
            assert self._news.wait(10), "a request waits for nothing"
        return self.core.step().outputs

    def settle(self) -> None:
        """Waits until all that was saved is written: jobs are done in order."""
        connector: Any = self.core._connector
        self._news.clear()
        connector._tier.load(TierLoad("of no request", [], [], [], ()))
        assert self._news.wait(10)

    @property
    def blocks_loaded(self) -> int:
        return self.core.scheduler.stats().kv_blocks_received


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 31 + i * 7) % VOCAB_SIZE for i in range(num_tokens)]


def expected(prompt: Sequence[int], max_tokens: int = 4, state_chunk: int = 0) -> list[int]:
    return expected_tokens(prompt, max_tokens, VOCAB_SIZE, state_chunk=state_chunk)


def rot(core: OffloadingCore, spared: Sequence[bytes] = ()) -> None:
    """Every byte in the file is another, except in the slots of the ``spared`` blocks."""
    connector: Any = core.core._connector
    core.settle()
    file = connector._tier._file.fileno()
    offsets = [connector._index.find(key) * BLOCK_BYTES for key in spared]
    blocks = [os.pread(file, BLOCK_BYTES, offset) for offset in offsets]
    os.pwrite(file, b"\xa5" * os.fstat(file).st_size, 0)
    for offset, block in zip(offsets, blocks, strict=True):
        os.pwrite(file, block, offset)
