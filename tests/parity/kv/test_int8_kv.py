"""With keys and values in 8 bits, tokens do not depend on how the work is batched, cut or interrupted."""

from pathlib import Path

import numpy as np
import pytest

from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tokenloom import demo_model
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest

MODEL = Path(demo_model.__file__).parent
NUM_TOKENS = 16
LENGTHS = (1, 15, 16, 17, 40, 70, 130, 300)
MAX_GAP, MAX_SHARE = 0.01, 0.02
"""The last bits of a float32 decide now and then how a number rounds to 8 bits, which moves logits by about 1e-3."""


def make_engine(**settings: object) -> Engine:
    return Engine(MODEL, **{"kv_cache_dtype": "int8", "num_blocks": 200, **settings})  # type: ignore[arg-type]


def prompt_of(length: int) -> list[int]:
    """The longer ones begin with the same 64 tokens."""
    return [(i * i * 7 + 13 * (length if i >= 64 or length < 64 else 0)) % 400 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """What the engine answers when each request runs by itself, with its prompt in one piece."""
    engine = make_engine(max_num_seqs=1)
    return [_case(engine, prompt_of(length)) for length in LENGTHS]


def _case(engine: Engine, prompt: list[int]) -> Case:
    params = CoreSamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, logprobs=20)
    engine.core.add_request(EngineCoreRequest(str(len(prompt)), prompt, params))
    tokens, rows = list[int](), list[np.ndarray]()
    while engine.core.has_work():
        for output in engine.core.step().outputs:
            columns = output.new_logprobs
            if columns is not None:
                rows.append(np.full(2048, -1e9, dtype=np.float32))
                rows[-1][list(columns.token_ids)] = columns.logprobs
            tokens += output.new_token_ids
    assert len(rows) == len(tokens) == NUM_TOKENS
    return Case(prompt, tokens, np.stack(rows))


def assert_same(cases: list[Case], engine: Engine) -> None:
    assert_identical(cases, engine.generate, MAX_GAP, MAX_SHARE)


def test_batches(cases: list[Case]) -> None:
    engine = make_engine()
    assert_same(cases, engine)
    assert engine.most_scheduled == len(cases)


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
def test_chunks_and_prefix_hits(cases: list[Case], attention_backend: str) -> None:
    engine = make_engine(budget=32, prefix_caching=True, attention_backend=attention_backend)
    assert_same(cases, engine)
    assert_same(cases, engine)
    assert engine.stats.prefix_cache_hits > 0


def test_preemption(cases: list[Case]) -> None:
    engine = make_engine(num_blocks=42, budget=64, max_model_len=600)
    assert_same([*cases, *cases[:6], *cases[:6]], engine)
    assert engine.stats.num_preemptions > 0


def test_a_continuation_goes_on_where_it_was(cases: list[Case]) -> None:
    """A preempted or moved request prefills the tokens that it has decoded."""
    half = NUM_TOKENS // 2
    rest = [Case(case.prompt + case.tokens[:half], case.tokens[half:], case.logits[half:]) for case in cases]
    assert_same(rest, make_engine())


def test_a_token_takes_little_more_than_half_of_bfloat16() -> None:
    rounded, whole = make_engine(dtype="bfloat16"), make_engine(dtype="bfloat16", kv_cache_dtype="auto")
    sizes = [engine.core.executor.kv_pool().block_bytes for engine in (rounded, whole)]
    assert sizes[0] / sizes[1] == (64 + 4) / 128
    assert [engine.core.ready.kv_layout for engine in (rounded, whole)] == [
        "HND/int8+fp32/4x2x64/16",
        "HND/bf16/4x2x64/16",
    ]
