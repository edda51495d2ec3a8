"""The state after a prompt moves with the prompt's blocks, and nothing of the prompt is computed again."""

import pytest

from tests.engine_core.helpers import VOCAB_SIZE
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.kv_pair import Pair, PairRequest
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

LARGE = 10_000
CHUNK = 6


def pair_of(chunk: int, nbytes: int = LARGE, *, budget: int = 64, faults: tuple[str, ...] = (), slots: int = 6) -> Pair:
    kv = KVConfig(transports=("memory",), checksum=True, failpoints=faults)
    settings = {"budget": budget, "num_blocks": 40, "block_size": 16, "max_num_seqs": 2}
    return Pair(kvs=[kv, kv], state_chunk=chunk, state_bytes=nbytes, num_slots=slots, **settings)


def check(pair: Pair, chunk: int) -> None:
    pair.settle()
    for request in pair.requests.values():
        assert request.tokens == expected_tokens(request.prompt, request.max_tokens, VOCAB_SIZE, state_chunk=chunk)
    for engine in pair.engines:
        check_idle(engine.core.scheduler)
    pair.shutdown()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("nbytes", [LARGE, STATE_BYTES])
@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48, 70])
def test_a_decode_engine_computes_decoded_tokens_only(length: int, chunk: int, nbytes: int, early: bool) -> None:
    pair = pair_of(chunk, nbytes, budget=24)
    pair.add("a", range(length), 5, early=early)
    check(pair, chunk)
    stats = pair.decode.stats
    assert not stats.kv_recomputes
    assert stats.kv_blocks_received == -(-length // 16), "a slot is no block"
    block_bytes = pair.decode.core.executor.kv_pool().block_bytes
    assert stats.kv_bytes_received == {"memory": stats.kv_blocks_received * block_bytes + nbytes}
    assert pair.decode.core.num_steps == 4, "a step for each token behind the first"


@pytest.mark.parametrize("chunk", [1, CHUNK])
def test_a_state_that_arrives_damaged_is_not_used(chunk: int) -> None:
    pair = pair_of(chunk, faults=("torn_copy=1",))  # the slot is copied last
    pair.add("a", range(40), 5)
    check(pair, chunk)
    assert pair.decode.stats.kv_recomputes == {"checksum": 1}


def test_a_lent_slot_stays_while_others_compute() -> None:
    """The reader is slow, and the owner has other prompts, for which few slots are left."""
    pair = pair_of(1, slots=4)
    pair.add("a", range(40), 5)
    while pair.step(pair.prefill):
        pass
    states = pair.prefill.core.scheduler.kv.states
    assert states is not None
    assert pair.prefill.stats.num_free_state_slots == 3
    for index in range(3):
        pair.add(f"b{index}", range(index, index + 50), 1)
        while pair.step(pair.prefill):
            pass
    check(pair, 1)
    assert not pair.decode.stats.kv_recomputes
    assert states.pool.num_free == 4


@pytest.mark.parametrize("chunk", [1, CHUNK])
def test_a_loaded_state_is_hit_by_the_next_prompt(chunk: int) -> None:
    pair = pair_of(chunk)
    pair.add("a", range(48), 5)
    pair.settle()
    pair.add("b", range(60), 5, swap=True)  # computed where the first one was decoded
    check(pair, chunk)
    assert pair.decode.stats.prefix_cache_hits == 48


@pytest.mark.parametrize("chunk", [1, CHUNK])
def test_a_prompt_without_a_first_token_is_computed(chunk: int) -> None:
    """The state after the last token does not tell that token's logits."""
    pair = pair_of(chunk)
    acquire = pair._acquire

    def without_token(request: PairRequest, *, awaits_tokens: bool) -> None:
        request.tokens = []
        acquire(request, awaits_tokens=awaits_tokens)

    pair._acquire = without_token  # type: ignore[method-assign]
    pair.add("a", range(20), 5)
    check(pair, chunk)
