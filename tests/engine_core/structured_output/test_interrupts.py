"""Interrupts the caller of a core while steps wait for the tokens that their grammars need."""

from collections.abc import Collection

import pytest

from tests.engine_core.executor.interrupted import InterruptedExecutor
from tests.engine_core.executor.late import LateExecutor
from tests.engine_core.structured_output.helpers import PERSON, VOCAB_SIZE, config, json_schema, make_request
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

CONFIG = EngineConfig(
    worker=WorkerConfig(model="", worker="hash"),
    cache=CacheConfig(block_size=4, num_blocks=512),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, async_scheduling=True),
    structured_output=config(),
)


def received(at: Collection[int], *, after: bool) -> dict[str, list[int]]:
    """Return the tokens of some constrained requests."""
    worker = HashWorker(CONFIG, vocab_size=VOCAB_SIZE, max_model_len=2048)
    executor = InterruptedExecutor(LateExecutor(worker), at, after=after)
    client = InprocClient(CONFIG, executor)  # type: ignore[arg-type]
    tokens: dict[str, list[int]] = {name: [] for name in "abcd"}
    for seed, name in enumerate(tokens):
        client.add_request(make_request(name, json_schema(PERSON), prompt=[seed] * 5, max_tokens=12))
    live = set(tokens)
    while live:
        try:
            outputs = client.get_output().outputs
        except KeyboardInterrupt:
            continue
        for output in outputs:
            assert output.token_index == len(tokens[output.request_id])
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                live.remove(output.request_id)
    assert executor.num_interrupts == len(at)
    client.close()
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return received((), after=False)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [(n,) for n in range(8, 17, 2)] + [(5, 6, 9), tuple(range(3, 40, 4))])
def test_an_interrupt_changes_no_token(expected: dict[str, list[int]], at: tuple[int, ...], after: bool) -> None:
    assert received(at, after=after) == expected
