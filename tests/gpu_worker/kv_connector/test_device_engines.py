"""Prefill and decode on two engines whose pools lie on devices: not a token may change, whatever fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu_worker.kv_connector.engine_pair import MAKE, Engine, MakeExecutor, Pair, apart, uni
from tokenloom.engine_core.data.core_params import CoreSamplingParams

LENGTHS = (1, 16, 33, 100)
PARAMS = CoreSamplingParams(max_tokens=8, seed=3, temperature=0.9, top_p=0.9)
MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    pairs = []

    def make(transport: str, prefill: MakeExecutor = apart, decode: MakeExecutor = apart, **kv: Any) -> Pair:
        pairs.append(Pair(MAKE[transport], prefill, decode, **kv))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prompt_of(length: int) -> list[int]:
    return [(length * 13 + i * i * 7) % 400 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[int, list[int]]]:
    """What one engine does alone."""
    engine, tokens = Engine([], apart), dict[int, list[int]]()
    for length in LENGTHS:
        engine.add(str(length), prompt_of(length), PARAMS)
        tokens[length] = [token for output in engine.run(str(length)) for token in output.new_token_ids]
    yield tokens
    engine.core.shutdown()


def ask_all(pair: Pair) -> dict[int, list[int]]:
    return {length: pair.ask(str(length), prompt_of(length), PARAMS) for length in LENGTHS}


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"),
    [
        pytest.param("cuda", apart, apart, id="cuda"),
        pytest.param("shm", apart, apart, id="shm"),
        pytest.param("tcp", apart, apart, id="tcp"),
        pytest.param("shm", apart, uni, id="shm, to a CPU"),
        pytest.param("unix", uni, apart, id="unix, from a CPU"),
    ],
)
def test_the_tokens_are_those_of_one_engine(transport, prefill, decode, make_pair, expected) -> None:
    pair = make_pair(transport, prefill, decode)
    assert ask_all(pair) == expected
    stats = pair.decode.core.scheduler.stats()
    num_blocks = sum(-(-length // 16) for length in LENGTHS)
    assert stats.kv_bytes_received == {
        pair.prefill.transport: num_blocks * pair.decode.core.executor.kv_pool().block_bytes
    }
    assert stats.kv_recomputes == {}


@pytest.mark.parametrize("transport", ["cuda", "shm", "unix"])
@pytest.mark.parametrize(
    ("failpoint", "side", "reason"),
    [
        ("torn_copy", "decode", "checksum"),
        ("copy_fails", "decode", "transport"),
        ("wrong_layout", "prefill", "layout"),
        ("lease_expires", "prefill", "lease_expired"),
    ],
)
def test_what_fails_is_computed_again(transport, failpoint, side, reason, make_pair, expected) -> None:
    pair = make_pair(transport, failpoints=(failpoint,))
    if reason != "layout":
        assert ask_all(pair) == expected
        assert pair.decode.core.scheduler.stats().kv_recomputes == {reason: len(LENGTHS)}
    else:
        with pytest.raises(AssertionError, match=reason):
            ask_all(pair)
    assert (pair.decode if side == "decode" else pair.prefill).core.failpoints_fired()[failpoint] > 0
