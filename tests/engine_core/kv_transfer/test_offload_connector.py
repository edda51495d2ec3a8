"""Small cores over the hash worker whose evicted blocks go to a file: wrong bytes anywhere would change tokens."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.config import KVConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.offload_tier import OffloadTier, TierLoad
from tokenloom.engine_core.wire.messages import EngineCoreOutput

BLOCK_SIZE = 4
BLOCK_BYTES = 8 * BLOCK_SIZE


class OffloadingCore:
    """A core and what tells when it may go on."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 64,
        policy: str = "recompute",
        executor: str = "uniproc",
        **config: object,
    ) -> None:
        base = make_config(
            block_size=BLOCK_SIZE,
            async_scheduling=executor != "uniproc",
            **config,  # type: ignore[arg-type]
        )
        kv = KVConfig(offload_path=str(directory), offload_bytes=slots * BLOCK_BYTES, policy=policy)
        self.config = msgspec.structs.replace(base, kv=kv)
        self.core = EngineCore(
            self.config,
            EXECUTORS[executor](HashWorker(self.config, vocab_size=VOCAB_SIZE, max_model_len=256)),
            make_core_kv(self.config, ()),
        )
        self._news = threading.Event()
        self.core.on_news(self._news.set)

    def run(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[list[int]]:
        """Tokens of each prompt, all asked for at once."""
        for index, prompt in enumerate(prompts):
            self.core.add_request(make_request(str(index), prompt, max_tokens))
        outputs: dict[str, list[EngineCoreOutput]] = {}
        while self.core.has_requests():
            self._news.clear()
            if not self.core.has_work():
                assert self._news.wait(10), "a request waits for nothing"
            for output in self.core.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
                assert not output.error
        return [tokens_of(outputs[str(index)]) for index in range(len(prompts))]

    def settle(self, tier: OffloadTier) -> None:
        """Waits until all that was saved is written: jobs are done in order."""
        self._news.clear()
        tier.load(TierLoad("nobody's", [], [], [], 0))
        assert self._news.wait(10)

    @property
    def blocks_loaded(self) -> int:
        return self.core.scheduler.stats().kv_blocks_received


@pytest.fixture
def make_core(tmp_path: Path) -> Iterator[Callable[..., OffloadingCore]]:
    made = []

    def make(**settings: object) -> OffloadingCore:
        made.append(OffloadingCore(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for core in made:
        check_idle(core.core.scheduler)
        core.core.shutdown()
        core.core.shutdown()


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 31 + i * 7) % VOCAB_SIZE for i in range(num_tokens)]


def expected(prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, max_tokens, VOCAB_SIZE)


def test_an_evicted_prefix_comes_back(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    for prompt in (first, second):
        assert core.run(prompt) == [expected(prompt)]
    assert core.blocks_loaded == 0
    assert core.run(first) == [expected(first)]
    stats = core.core.scheduler.stats()
    assert stats.kv_blocks_received >= 5
    assert stats.kv_bytes_received == {"offload": stats.kv_blocks_received * BLOCK_BYTES}
    assert stats.kv_recomputes == {}


def test_wrong_content_does_not_come_back(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    for prompt in (first, second):
        core.run(prompt)
    core.core.add_request(make_request("a", first, 4))
    hashes = core.core.scheduler.requests["a"].block_hashes
    while not core.blocks_loaded:
        core.core.step()
    core.core.scheduler.kv.pool.forget(core.core.scheduler.requests["a"].block_ids)
    assert len(hashes) >= 5
    core.core.abort_requests(["a"])
    loaded = core.blocks_loaded
    assert core.run(first) == [expected(first)]
    assert core.blocks_loaded == loaded


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 29, 32, 33])
def test_prompts_of_all_lengths_come_back(make_core: Callable[..., OffloadingCore], num_tokens: int) -> None:
    core = make_core(num_blocks=10)
    prompt, filler = prompt_of(1, num_tokens), prompt_of(2, 36)
    for asked in (prompt, filler, prompt):
        assert core.run(asked) == [expected(asked)]
    assert core.blocks_loaded == (num_tokens - 1) // BLOCK_SIZE


def test_only_what_the_pool_lost_is_loaded(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=12)
    shared = prompt_of(1, 16)
    core.run([*shared, 5])
    core.run(prompt_of(2, 36))
    core.run([*shared, 6])
    loaded = core.blocks_loaded
    assert 0 < loaded <= 4
    core.run([*shared, 7])
    assert core.blocks_loaded == loaded, "they are back in the pool"


def test_requests_at_once(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=24)
    prompts = [prompt_of(seed, 20 + seed) for seed in range(8)]
    for _ in range(3):
        assert core.run(*prompts) == [expected(prompt) for prompt in prompts]
    assert core.blocks_loaded > 0


def test_salts_do_not_share(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    prompt = prompt_of(1, 30)
    core.run(prompt)
    core.run(prompt_of(2, 36))
    core.core.add_request(make_request("salted", prompt, salt=b"other"))
    while core.core.has_requests():
        core.core.step()
    assert core.blocks_loaded == 0


def rot(core: OffloadingCore) -> None:
    """Every byte in the file is another."""
    connector: Any = core.core._connector
    core.settle(connector._tier)
    file = connector._tier._file.fileno()
    os.pwrite(file, b"\xa5" * os.fstat(file).st_size, 0)


def test_a_file_that_rots_costs_time_and_no_token(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    core.run(prompt_of(3, 4))
    rot(core)
    assert core.run(first, max_tokens=4) == [expected(first)]
    assert core.core.scheduler.stats().kv_recomputes == {"checksum": 1}


def test_a_tier_of_one_slot_works(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10, slots=1)
    for prompt in (prompt_of(seed % 3, 33) for seed in range(9)):
        assert core.run(prompt) == [expected(prompt)]


def test_resetting_the_prefix_cache_forgets_the_file(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    assert core.core.reset_prefix_cache()
    assert core.run(first) == [expected(first)]
    assert core.blocks_loaded == 0


def test_aborting_a_request_that_loads_frees_its_blocks_when_the_load_ends(
    make_core: Callable[..., OffloadingCore],
) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    core.core.add_request(make_request("a", first))
    core.core.step()
    core.core.abort_requests(["a"])
    assert core.run(second) == [expected(second)]


def test_an_evicted_block_that_a_step_in_flight_computes_is_not_saved(
    make_core: Callable[..., OffloadingCore],
) -> None:
    core = make_core(num_blocks=10, executor="late")
    first, second = prompt_of(1, 30), prompt_of(2, 36)
    core.core.add_request(make_request("a", first))
    core.core.step()
    core.core.abort_requests(["a"])  # its blocks can be hit, and are not computed yet
    for prompt in (second, first, second, first):
        assert core.run(prompt) == [expected(prompt)]
    assert core.blocks_loaded > 0


def test_a_file_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is smaller than one block"):
        OffloadingCore(tmp_path, slots=0)


PROMPTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=4), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(
    rounds=PROMPTS,
    slots=st.sampled_from([1, 3, 8, 64]),
    num_blocks=st.sampled_from([12, 20]),
    executor=st.sampled_from(list(EXECUTORS)),
)
def test_random_prompts_get_their_tokens(
    rounds: list[list[tuple[int, int]]], slots: int, num_blocks: int, executor: str
) -> None:
    directory = Path(tempfile.gettempdir())
    core = OffloadingCore(directory, slots=slots, num_blocks=num_blocks, budget=16, executor=executor)
    try:
        for asked in rounds:
            prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in asked]
            assert core.run(*prompts) == [expected(prompt) for prompt in prompts]
        check_idle(core.core.scheduler)
    finally:
        core.core.shutdown()
