"""The states of real models move between engines with the keys and values: transformers' tokens, and no prompt is
computed again."""

from pathlib import Path

import pytest

from tests.engine_core.kv_transfer.storing_core import settle
from tests.gpu_worker.kv_connector.engine_pair import MAKE, Engine, Pair, mp, tier
from tests.parity.state_checkpoints import SERVED, write_model
from tests.parity.test_states import Reference, draw
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.kv_connector import nixl

TRANSPORTS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "nixl" and not nixl.is_available(), reason="nixl is missing"))
    for name in ("unix", "tcp", "nixl")
]
PARAMS = CoreSamplingParams(max_tokens=10, seed=3, temperature=0.0)
LENGTHS = (1, 2, 16, 64, 100, 257)


@pytest.fixture(scope="module", params=SERVED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def wanted(kind: str) -> list[list[int]]:
    return Reference(kind).answers([draw(length, length) for length in LENGTHS], 10)


def test_decode_continues_from_the_state_of_the_prompt(path: str, wanted: list[list[int]]) -> None:
    check_pair(path, wanted, "shm")


# Built-in layers, and a model that attends nowhere.
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"], indirect=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_moves_states(path: str, kind: str, wanted: list[list[int]], transport: str) -> None:
    check_pair(path, wanted, transport)


def check_pair(path: str, wanted: list[list[int]], transport: str) -> None:
    pair = Pair(MAKE[transport], model=path)
    try:
        for length, tokens in zip(LENGTHS, wanted, strict=True):
            assert pair.ask(f"r{length}", draw(length, length), PARAMS) == tokens
        check(pair, len(LENGTHS))
    finally:
        pair.close()


def test_the_states_of_workers_in_other_processes_move(tmp_path: Path) -> None:
    path = str(write_model("qwen3_5_text", tmp_path))
    pair = Pair(MAKE["shm"], prefill=mp, decode=mp, model=path)
    try:
        [tokens] = Reference("qwen3_5_text").answers([draw(100, 3)], 10)
        assert pair.ask("r", draw(100, 3), PARAMS) == tokens
        check(pair, 1)
    finally:
        pair.close()


def check(pair: Pair, num_requests: int) -> None:
    """Check that each step of the decode engine computed decoded tokens, and all slots are free."""
    stats = pair.decode.core.scheduler.stats()
    assert not stats.kv_recomputes
    pool = pair.decode.core.executor.kv_pool()
    assert pool.slot_bytes
    of_blocks = stats.kv_blocks_received * pool.block_bytes
    assert sum(stats.kv_bytes_received.values()) == of_blocks + num_requests * pool.slot_bytes
    assert pair.decode.core.num_steps == num_requests * 9
    for engine in (pair.prefill, pair.decode):
        states = engine.core.scheduler.kv.states
        assert states is not None
        engine.core.step()  # takes back what the reader has released
        states.begin_step()
        assert states.pool.num_free == states.pool.num_blocks


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "mamba2"], indirect=True)
def test_states_come_back_from_the_offload_file(path: str, kind: str, tmp_path: Path) -> None:
    engine = Engine([], model=path, num_blocks=24, offload_path=str(tmp_path), offload_bytes=64 << 20)
    prompts = [draw(257, seed) for seed in range(3)]
    wanted = Reference(kind).answers(prompts, 10)
    for turn in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True)):
            engine.add(f"{turn}.{index}", prompt, PARAMS)
            outputs = engine.run(f"{turn}.{index}")
            assert [token for output in outputs for token in output.new_token_ids] == tokens
    stats = engine.core.scheduler.stats()
    pool = engine.core.executor.kv_pool()
    of_states = stats.kv_bytes_received["offload"] - stats.kv_blocks_received * pool.block_bytes
    assert of_states >= 2 * pool.slot_bytes
    assert stats.kv_blocks_received >= 2 * 15
    assert not stats.kv_recomputes
    engine.core.shutdown()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "mamba2"], indirect=True)
def test_engines_share_states_through_a_folder(path: str, kind: str, wanted: list[list[int]], tmp_path: Path) -> None:
    prompts = [draw(length, length) for length in LENGTHS]
    for turn in range(2):
        engine = Engine([], model=path, **tier("folder", tmp_path))
        for index, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True)):
            engine.add(f"{turn}.{index}", prompt, PARAMS)
            outputs = engine.run(f"{turn}.{index}")
            assert [token for output in outputs for token in output.new_token_ids] == tokens
        settle(engine.core._connector)
        stats, pool = engine.core.scheduler.stats(), engine.core.executor.kv_pool()
        engine.core.shutdown()
    of_states = stats.kv_bytes_received["folder"] - stats.kv_blocks_received * pool.block_bytes
    assert of_states >= 2 * pool.slot_bytes
    assert not stats.kv_recomputes
