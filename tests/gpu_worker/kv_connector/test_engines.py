"""Prefill and decode on two engines with a real model, joined by each transport: not a token may change."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.kv_connector.engine_pair import MAKE, MODEL, Engine, MakeExecutor, Pair, mp, tier, uni
from tests.gpu_worker.lora.random_adapter import save_adapter
from tokenloom.engine_core.data.config import LoraConfig, SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL
from tokenloom.request.adapter_names import adapter_salt

LENGTHS = (1, 15, 16, 17, 33, 100, 400)
GREEDY = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.0)
SAMPLED = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.9, top_p=0.9, frequency_penalty=0.3)
NEEDS_NIXL = pytest.mark.skipif(not nixl.is_available(), reason="no nixl")

MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    pairs = []

    def make(transport: str, prefill: MakeExecutor = uni, decode: MakeExecutor = uni, **kv: Any) -> Pair:
        pairs.append(Pair(MAKE[transport], prefill, decode, **kv))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prompt_of(length: int) -> list[int]:
    return [(length * 13 + i * i * 7) % 400 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[[int, CoreSamplingParams], list[int]]]:
    """What one engine does alone; each asked for once."""
    engine, known = Engine([]), dict[tuple[int, int], list[int]]()

    def tokens(length: int, params: CoreSamplingParams) -> list[int]:
        key = length, id(params)
        if key not in known:
            engine.core.reset_prefix_cache()
            engine.add(str(key), prompt_of(length), params)
            known[key] = [token for output in engine.run(str(key)) for token in output.new_token_ids]
        return known[key]

    yield tokens
    engine.core.shutdown()


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"),
    [
        pytest.param("shm", uni, uni, id="shm"),
        pytest.param("unix", uni, uni, id="unix"),
        pytest.param("tcp", uni, uni, id="tcp"),
        pytest.param("nixl", uni, uni, id="nixl", marks=NEEDS_NIXL),
        pytest.param("tcp", mp, uni, id="tcp, mp to uni"),
        pytest.param("unix", uni, mp, id="unix, uni to mp"),
        pytest.param("nixl", mp, mp, id="nixl, mp", marks=NEEDS_NIXL),
    ],
)
def test_the_tokens_are_those_of_one_engine(
    transport: str,
    prefill: MakeExecutor,
    decode: MakeExecutor,
    make_pair: MakePair,
    expected: Callable[[int, CoreSamplingParams], list[int]],
) -> None:
    pair = make_pair(transport, prefill, decode)
    for length in LENGTHS:
        for params in (GREEDY, SAMPLED):
            pair.prefill.core.reset_prefix_cache()
            pair.decode.core.reset_prefix_cache()
            assert pair.ask(f"{length}-{id(params)}", prompt_of(length), params) == expected(length, params)
    stats = pair.decode.core.scheduler.stats()
    num_blocks = 2 * sum(-(-length // 16) for length in LENGTHS)
    assert stats.kv_blocks_received == num_blocks
    assert stats.kv_bytes_received == {
        pair.prefill.transport: num_blocks * pair.decode.core.executor.kv_pool().block_bytes
    }
    assert stats.kv_recomputes == {}
    for engine in (pair.prefill, pair.decode):
        while engine.core.has_work():
            engine.core.step()
        assert engine.core.scheduler.stats().kv_usage == 0.0


@pytest.mark.parametrize("layouts", [{}, {"dora": {"use_dora": True}, "ends": {"kinds": ("embed_tokens", "lm_head")}}])
def test_both_legs_compute_with_the_same_adapter(
    layouts: dict[str, dict[str, Any]], make_pair: MakePair, tmp_path: Path
) -> None:
    paths = {name: save_adapter(tmp_path / name, DEMO_MODEL, **entries) for name, entries in layouts.items()}
    paths = paths or {name: DEMO_ADAPTERS / name for name in ("json", "pirate")}
    lora = LoraConfig(enable=True, modules=tuple(f"{name}={path}" for name, path in paths.items()))
    pair, alone = make_pair("shm", lora=lora), Engine([], lora=lora)
    adapters = [b"", *(state.digest for state in alone.core.ready.loras)]
    found = set()
    for number, adapter in enumerate(adapters):
        salt = adapter_salt(b"", adapter)
        alone.add(str(number), prompt_of(100), GREEDY, adapter=adapter, cache_salt=salt)
        expected = [token for output in alone.run(str(number)) for token in output.new_token_ids]
        assert pair.ask(str(number), prompt_of(100), GREEDY, adapter) == expected
        found.add(tuple(expected))
    assert len(found) == len(adapters)
    assert pair.decode.core.scheduler.stats().kv_blocks_received == 3 * 7, "no adapter hits the blocks of another"
    alone.core.shutdown()


def test_what_moved_can_be_hit(make_pair: MakePair, expected: Callable[[int, CoreSamplingParams], list[int]]) -> None:
    pair = make_pair("shm")
    assert pair.ask("a", prompt_of(100), GREEDY) == expected(100, GREEDY)
    received = pair.decode.core.scheduler.stats().kv_blocks_received
    assert pair.ask("b", prompt_of(100), GREEDY) == expected(100, GREEDY)
    assert pair.decode.core.scheduler.stats().kv_blocks_received == received + 1, "only the last, partial block"


def test_an_offload_file_gives_back_what_it_took(
    tmp_path: Path, expected: Callable[[int, CoreSamplingParams], list[int]]
) -> None:
    engine = Engine([], offload_path=str(tmp_path), offload_bytes=64 << 20)
    for request_id, length in (("a", 400), ("b", 1800), ("c", 400)):
        engine.add(request_id, prompt_of(length), GREEDY)
        tokens = [token for output in engine.run(request_id) for token in output.new_token_ids]
        if length == 400:
            assert tokens == expected(400, GREEDY)
    stats = engine.core.scheduler.stats()
    assert stats.kv_bytes_received["offload"] > 0
    assert stats.kv_recomputes == {}
    engine.core.shutdown()


@pytest.mark.parametrize("executor", [uni, mp])
def test_engines_share_blocks_through_a_folder(
    tmp_path: Path, executor: MakeExecutor, expected: Callable[[int, CoreSamplingParams], list[int]]
) -> None:
    for number in range(2):
        engine = Engine([], executor, **tier("folder", tmp_path))
        engine.add("a", prompt_of(400), GREEDY)
        assert [token for output in engine.run("a") for token in output.new_token_ids] == expected(400, GREEDY)
        stats = engine.core.scheduler.stats()
        assert (stats.kv_blocks_received, stats.kv_recomputes) == (24 * number, {})
        while len(list(tmp_path.glob("*.kv"))) < 25:
            os.sched_yield()
        engine.core.shutdown()


@pytest.mark.parametrize("executor", [uni, mp])
def test_pulling_and_offloading_go_together(
    tmp_path: Path,
    executor: MakeExecutor,
    make_pair: MakePair,
    expected: Callable[[int, CoreSamplingParams], list[int]],
) -> None:
    pair = make_pair("shm", executor, executor, offload_path=str(tmp_path), offload_bytes=64 << 20)
    lengths = (400, 1500, 701, 400, 1500)
    for number, length in enumerate(lengths):
        assert pair.ask(str(number), prompt_of(length), GREEDY) == expected(length, GREEDY)
    prefill, decode = (engine.core.scheduler.stats() for engine in (pair.prefill, pair.decode))
    assert prefill.kv_bytes_received["offload"] > 0, "a prompt that comes again is not computed again"
    assert decode.kv_bytes_received["shm"] > 0
    assert prefill.kv_recomputes == decode.kv_recomputes == {}


def test_keys_and_values_in_8_bits_move_as_they_are(tmp_path: Path, make_pair: MakePair) -> None:
    alone = Engine([], kv_cache_dtype="int8")
    pair = make_pair("shm", kv_cache_dtype="int8", offload_path=str(tmp_path), offload_bytes=64 << 20)
    for number, length in enumerate((15, 17, 400, 1500, 701, 400, 1500)):
        alone.add(str(number), prompt_of(length), GREEDY)
        expected = [token for output in alone.run(str(number)) for token in output.new_token_ids]
        assert pair.ask(str(number), prompt_of(length), GREEDY) == expected
    prefill, decode = (engine.core.scheduler.stats() for engine in (pair.prefill, pair.decode))
    assert prefill.kv_bytes_received["offload"] > 0
    assert decode.kv_bytes_received["shm"] > 0
    assert prefill.kv_recomputes == decode.kv_recomputes == {}
    alone.core.shutdown()


def test_pools_of_different_dtypes_exchange_no_blocks() -> None:
    rounded, whole = (Engine(MAKE["shm"](), kv_cache_dtype=dtype) for dtype in ("int8", "auto"))
    whole.add("a", prompt_of(20), GREEDY, lease_id=b"a")
    whole.run("a")
    layout, digest = rounded.core.ready.kv_layout, prompt_digest(prompt_of(20), b"")
    answer = whole.answer(KVAcquire(1, b"a", layout, digest, ["shm"]))
    assert answer.target is None
    assert (answer.failure, "HND/int8+fp32/4x2x64/16" in answer.detail) == ("layout", True)
    rounded.core.shutdown()
    whole.core.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("method", "folder"), [("draft_model", "draft"), ("eagle", "eagle")])
def test_what_drafts_gets_its_kv_from_the_other_engine_too(
    method: Any, folder: str, make_pair: MakePair, expected: Callable[[int, CoreSamplingParams], list[int]]
) -> None:
    pair = make_pair("shm", speculative=SpeculativeConfig(method, 3, f"{MODEL}/{folder}"))
    assert "+" in pair.decode.core.ready.kv_layout
    drafts = pair.decode.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = None
    for length in (17, 100):
        for params in (GREEDY, SAMPLED):
            assert pair.ask(f"{length}-{params.temperature}", prompt_of(length), params) == expected(length, params)
    assert drafts.stats().num_accepted_tokens
