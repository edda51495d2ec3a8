"""A small core over the hash worker that shares blocks through a store, and a store in memory that can fail."""

import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, tokens_of
from tests.engine_core.kv_cache.grouped_hash_worker import GroupedHashWorker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.messages import EngineCoreOutput
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_transfer.block_store import Buffer, StoreError
from tokenloom.engine_core.kv_transfer.core_kv import CoreKV, make_core_kv
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.store_connector import StoreConnector

BLOCK_SIZE = 4
BLOCK_BYTES = 8 * BLOCK_SIZE
WEIGHTS = b"weights and numerics"


class MemoryStore:
    """Keeps values in a dictionary that several engines may have."""

    label = "memory"

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values = values
        self.num_searches = 0
        self.fails = False
        self.may_answer, self.may_write = threading.Event(), threading.Event()
        """Cleared: no call, or no write, returns before it is set."""
        self.may_answer.set()
        self.may_write.set()

    def find(self, keys: Sequence[bytes], *, in_order: bool) -> set[bytes]:
        self.num_searches += 1
        self._answer()
        return self.values.keys() & set(keys)

    def read(self, keys: Sequence[bytes], nbytes: int) -> Generator[Buffer | None, None, None]:
        for key in keys:
            self._answer()
            yield self.values.get(key)

    def write(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        self.may_write.wait()
        self._answer()
        if key in self.values:
            return False
        self.values[key] = b"".join(parts)
        return True

    def remove(self, key: bytes) -> None:
        self._answer()
        self.values.pop(key, None)

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        self.may_answer.wait()
        if self.fails:
            raise StoreError("the network is down")


class StoringCore:
    """A core, and the events that let it continue."""

    def __init__(
        self,
        store: MemoryStore | str,
        *,
        weights: bytes = WEIGHTS,
        block_hash_seed: bytes = b"",
        executor: str = "uniproc",
        windows: Sequence[int | None] = (),
        timeout: float = 20.0,
        store_bytes: int = 0,
        offload: Path | None = None,
        state_chunk: int = 0,
        state_bytes: int = STATE_BYTES,
        num_states: int = 0,
        **config: object,
    ) -> None:
        """``store``: itself, or its URL. ``windows``: those of the groups of layers, if there are several. ``offload``:
        folder of a file for evicted blocks, beside a store with a URL. ``state_chunk``, ``state_bytes``: of a layer
        that keeps a state, if there is one, with ``num_states`` slots."""
        base = make_config(block_size=BLOCK_SIZE, async_scheduling=executor != "uniproc", **config)  # type: ignore[arg-type]
        memory = num_states * state_bytes or None
        cache = msgspec.structs.replace(base.cache, block_hash_seed=block_hash_seed, state_memory_bytes=memory)
        base = msgspec.structs.replace(base, cache=cache)
        self.config = base
        if isinstance(store, str):
            file = {} if offload is None else {"offload_path": str(offload), "offload_bytes": 64 * BLOCK_BYTES}
            kv = KVConfig(store=store, store_bytes=store_bytes, store_timeout_seconds=timeout, **file)
            self.config = msgspec.structs.replace(base, kv=kv)
            parts = make_core_kv(self.config, ())
        else:
            connector = StoreConnector(
                base.cache, lambda: store, store.label, timeout=timeout, load_timeout=max(timeout, 20.0)
            )
            parts = CoreKV(connector, Failpoints(), None)
        worker = HashWorker(
            self.config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=state_chunk, state_bytes=state_bytes
        )
        if windows:
            worker = GroupedHashWorker(self.config, windows)
        self.core = EngineCore(self.config, EXECUTORS[executor](worker), parts)
        self.connector: Any = self.core._connector
        if offload is not None:
            self.connector = self.connector._connectors[-1]
        self._news = threading.Event()
        self.core.on_update(self._news.set)
        if weights:
            self.core.scheduler.share_kv(weights)

    def run(self, *prompts: Sequence[int], max_tokens: int = 4, settles: bool = True, **extra: Any) -> list[list[int]]:
        """Tokens of each prompt, all asked for at once. ``settles``: wait until what they computed is saved."""
        for index, prompt in enumerate(prompts):
            self.core.add_request(make_request(str(index), prompt, max_tokens, **extra))
        outputs: dict[str, list[EngineCoreOutput]] = {}
        while self.core.has_requests():
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
                assert not output.error
        if settles:
            self.settle()
        return [tokens_of(outputs[str(index)]) for index in range(len(prompts))]

    def step(self) -> list[EngineCoreOutput]:
        """One step, after an answer of the store if nothing else can be done."""
        self._news.clear()
        if not self.core.has_work():
            assert self._news.wait(30), "a request waits for nothing"
        return self.core.step().outputs

    def settle(self) -> None:
        settle(self.connector)

    @property
    def num_loaded(self) -> int:
        return self.core.scheduler.stats().kv_blocks_received

    @property
    def num_saved(self) -> int:
        saved: int = self.connector.queue.num_saved
        return saved


def settle(connector: Any) -> None:
    """Wait until all that was given to a connector's thread of saves is done."""
    done = threading.Event()

    class Last:
        @property
        def is_current(self) -> bool:
            done.set()
            return False

    connector.queue.save(Last())
    assert done.wait(30)
