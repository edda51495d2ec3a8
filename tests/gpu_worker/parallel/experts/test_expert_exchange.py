"""Rows reach the rank that holds their expert, and come back in their order."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import ExpertPeers
from tokenloom.gpu_worker.parallel.experts.expert_exchange import ExpertExchange
from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows
from tokenloom.gpu_worker.parallel.ranks import Ranks

NUM_EXPERTS = 5
HIDDEN_SIZE = 6
KEY = b"the key of the group"


def run_expert(expert: int, rows: Tensor) -> Tensor:
    return rows * (expert + 2)


def choose(num_tokens: int, seed: int) -> GroupedRows:
    generator = torch.Generator().manual_seed(seed)
    return GroupedRows.sort(torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2, -1).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [(7, 3), (1, 40), (4, 0)])
def test_each_rank_gets_what_its_rows_would_give_on_one(dtype: torch.dtype, num_tokens: tuple[int, int]) -> None:
    asked: list[set[int]] = [set(), set()]
    exchanges = [ExpertExchange(number, 2) for number in range(2)]
    workers = [[exchange.listen("127.0.0.1")] for exchange in exchanges]

    def rank(number: int) -> None:
        exchange = exchanges[number]
        Ranks(experts=exchange).join_experts(ExpertPeers(number, workers, epoch=1, key=KEY))

        def run(expert: int, rows: Tensor) -> Tensor:
            asked[number].add(expert)
            return run_expert(expert, rows)

        for step in range(3):
            grouped = choose(num_tokens[number], seed=10 * step + number)
            rows = torch.randn(2 * num_tokens[number], HIDDEN_SIZE).to(dtype)
            parts = zip(grouped.experts, rows.split(grouped.counts) if len(rows) else (), strict=True)
            expected = [run_expert(expert, part) for expert, part in parts]
            computed = exchange.compute(rows, grouped, NUM_EXPERTS, run)
            assert torch.equal(computed, torch.cat(expected) if expected else rows)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))
    assert asked[0] <= {0, 1}
    assert asked[1] <= {2, 3, 4}
    for exchange in exchanges:
        exchange.close()


def test_workers_of_a_stage_exchange_rows_among_themselves() -> None:
    """Stages have different layers, and are at different steps."""
    places = [(member, stage) for member in range(2) for stage in range(2)]
    exchanges = {place: ExpertExchange(place[0], 2, stage=place[1]) for place in places}
    workers = [[exchanges[member, stage].listen("127.0.0.1") for stage in range(2)] for member in range(2)]

    def rank(place: tuple[int, int]) -> None:
        member, stage = place
        exchange = exchanges[place]
        Ranks(experts=exchange).join_experts(ExpertPeers(member, workers, epoch=1, key=KEY))
        grouped = choose(6, seed=member)
        rows = torch.randn(12, HIDDEN_SIZE)
        computed = exchange.compute(rows, grouped, NUM_EXPERTS, lambda expert, rows: run_expert(expert, rows) + stage)
        parts = zip(grouped.experts, rows.split(grouped.counts), strict=True)
        assert torch.equal(computed, torch.cat([run_expert(expert, part) + stage for expert, part in parts]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(rank, places))
    for exchange in exchanges.values():
        exchange.close()


def test_before_it_joins_a_rank_computes_its_own_experts_only() -> None:
    grouped = choose(20, seed=1)
    rows = torch.randn(40, HIDDEN_SIZE)
    computed = ExpertExchange(1, 2).compute(rows, grouped, NUM_EXPERTS, run_expert)
    for expert, before, after in zip(
        grouped.experts, rows.split(grouped.counts), computed.split(grouped.counts), strict=True
    ):
        assert torch.equal(after, run_expert(expert, before) if expert >= 2 else torch.zeros_like(before))


@pytest.mark.parametrize("counts", [[-1, 2], [1 << 62, 1 << 62], [1 << 40, 0]])
def test_numbers_of_rows_that_no_step_has_end_the_step(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = [ExpertExchange(number, 2) for number in range(2)]
    workers = [[exchange.listen("127.0.0.1")] for exchange in exchanges]
    with ThreadPoolExecutor(2) as threads:
        peers = [ExpertPeers(number, workers, epoch=1, key=KEY) for number in range(2)]
        list(threads.map(lambda exchange, peers: exchange.join(peers), exchanges, peers))
    announced = np.array([[counts], [counts]], np.int64)
    monkeypatch.setattr(exchanges[0], "_exchange_counts", lambda *_: announced)
    with pytest.raises(PeerLostError, match="announced"):
        exchanges[0].compute(torch.randn(40, HIDDEN_SIZE), choose(20, seed=1), NUM_EXPERTS, run_expert)
    for exchange in exchanges:
        exchange.close()
