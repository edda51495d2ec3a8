"""Ranks that count the same steps move their experts together, over links of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import EplbConfig
from tokenloom.gpu_worker.parallel.experts.balancer import ExpertBalancer
from tokenloom.gpu_worker.parallel.experts.planner import Ints

NUM_EXPERTS, NUM_LAYERS, SIZE = 6, 2, 2
SHAPES, NBYTES = ((4, 3), (3, 2)), 72


@dataclass
class Net:
    """Carries bytes and sums between the threads of the ranks."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=30))
    sums: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    most_bytes: int = 0


class Link:
    """Fulfils ``WeightLink``. What is received arrives only when it is waited for, as over a slow network."""

    def __init__(self, net: Net, rank: int) -> None:
        self._net, self.rank, self.size = net, rank, SIZE

    def send(self, x: Tensor, rank: int, tag: int) -> "Arrival":
        self._net.sent[self.rank, rank, tag] = x
        self._net.most_bytes = max(self._net.most_bytes, len(x))
        return Arrival(self._net, None, (self.rank, rank, tag))

    def receive(self, x: Tensor, rank: int, tag: int) -> "Arrival":
        return Arrival(self._net, x, (rank, self.rank, tag))

    def add(self, x: Tensor) -> Tensor:
        self._net.sums[self.rank] = x
        self._net.barrier.wait()
        total = torch.stack(list(self._net.sums.values())).sum(0)
        self._net.barrier.wait()
        return total


@dataclass
class Arrival:
    net: Net
    target: Tensor | None
    key: tuple[int, int, int]

    def wait(self) -> None:
        if self.target is not None:
            self.target.copy_(self.net.sent[self.key])


def matrices(layer: int, expert: int) -> list[Tensor]:
    return [torch.full(shape, 100.0 * layer + expert) for shape in SHAPES]


class Layer:
    """Fulfils ``MovableExperts``."""

    def __init__(self, number: int, places: dict[int, int]) -> None:
        """``places``: the expert at each place of this rank."""
        self.experts = {place: matrices(number, expert) for place, expert in places.items()}
        self.prepared: dict[int, list[Tensor]] = {}

    def packed_bytes(self) -> int:
        return NBYTES

    def pack(self, place: int) -> Tensor:
        return torch.cat([each.view(torch.uint8).flatten() for each in self.experts[place]])

    def prepare(self, place: int, data: Tensor) -> None:
        parts = data.view(torch.float32).clone().split([12, 6])
        self.prepared[place] = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]

    def switch(self) -> int:
        count = len(self.prepared)
        self.experts |= self.prepared
        self.prepared = {}
        return count

    def forget_prepared(self) -> None:
        self.prepared = {}


class Rank:
    """One rank, whose tokens choose the experts that ``loads`` says."""

    def __init__(self, net: Net, rank: int, config: EplbConfig) -> None:
        self._net = net
        self.balancer = ExpertBalancer(config, SIZE, rank)
        self.placements = [self.balancer.layer(number, NUM_EXPERTS) for number in range(NUM_LAYERS)]
        per_rank = len(self.placements[0].logical) // SIZE
        self.own = range(rank * per_rank, (rank + 1) * per_rank)
        self.layers = [
            Layer(number, {place: int(placement.logical[place]) for place in self.own})
            for number, placement in enumerate(self.placements)
        ]
        self.counts: Ints = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64)
        self.history: list[list[list[int]]] = []
        self.balancer.use(lambda: self.layers, lambda: self.counts.copy())
        self.balancer.join(Link(net, rank))

    def step(self, loads: list[int]) -> None:
        self.counts += np.array(loads)
        self._net.barrier.wait()  # the forward pass, in which ranks wait for each other
        self.balancer.stepped()
        self._net.barrier.wait()
        self.history.append([placement.logical.tolist() for placement in self.placements])

    def check(self) -> None:
        """Assert that each place of this rank holds the weights that the placement says."""
        for number, (layer, placement) in enumerate(zip(self.layers, self.placements, strict=True)):
            for place in self.own:
                for found, expected in zip(
                    layer.experts[place], matrices(number, int(placement.logical[place])), strict=True
                ):
                    assert torch.equal(found, expected), (number, place)


def run(config: EplbConfig, loads: list[int], num_steps: int, stale_at: int = -1) -> tuple[list[Rank], Net]:
    """Step two ranks, of which only the first has tokens. After the step ``stale_at`` it loads other weights."""
    net = Net()

    def work(number: int) -> Rank:
        rank = Rank(net, number, config)
        for step in range(1, num_steps + 1):
            rank.step(loads if number == 0 else [0] * NUM_EXPERTS)
            rank.check()
            if step == stale_at and number == 0:
                rank.balancer.weights_changed()
        return rank

    with ThreadPoolExecutor(SIZE) as threads:
        ranks = list(threads.map(work, range(SIZE)))
    assert ranks[0].history == ranks[1].history, "all ranks use a placement from the same step on"
    return ranks, net


def test_busy_experts_are_separated_while_steps_go_on() -> None:
    config = EplbConfig(window_size=4, step_interval=4, move_bytes=1 << 10)
    ranks, net = run(config, [90, 80, 70, 1, 1, 1], 20)
    first, last = ranks[0].history[0], ranks[0].history[-1]
    assert first == [[0, 1, 2, 3, 4, 5]] * 2
    assert sum(len({0, 1, 2} & {*half}) == 2 for half in (last[0][:3], last[0][3:])) == 1
    assert ranks[0].history[3] == first, "the loads of four steps are counted"
    assert ranks[0].balancer.stats.balancedness == pytest.approx(ranks[1].balancer.stats.balancedness)
    assert sum(rank.balancer.stats.num_moved for rank in ranks) >= 4, "two experts of each layer"
    assert net.most_bytes == NBYTES


def test_what_is_sent_in_a_step_is_bounded() -> None:
    """The shape has 72 bytes, so that an expert takes several steps."""
    config = EplbConfig(window_size=4, step_interval=4, move_bytes=16)
    ranks, net = run(config, [90, 80, 70, 1, 1, 1], 30)
    assert net.most_bytes <= 16
    assert ranks[0].history[-1] != ranks[0].history[0]


def test_copies_of_the_busiest_expert() -> None:
    config = EplbConfig(window_size=4, step_interval=4, num_redundant_experts=2)
    ranks, _ = run(config, [1000, 10, 10, 10, 10, 10], 30)
    for logical in ranks[0].history[-1]:
        assert 0 in logical[:4]
        assert 0 in logical[4:]
    stats = ranks[0].balancer.stats
    assert stats.num_plans >= 2
    assert stats.balancedness > 0.9


def test_weights_that_change_on_one_rank_end_the_moves_on_all() -> None:
    config = EplbConfig(window_size=4, step_interval=4, move_bytes=16)
    ranks, _ = run(config, [90, 80, 70, 1, 1, 1], 9, stale_at=6)
    assert ranks[0].history[-1] == ranks[0].history[0]
    assert all(rank.balancer.stats.num_moved == 0 for rank in ranks)
    assert all(not layer.prepared for rank in ranks for layer in rank.layers)


class LostLink(Link):
    """Fulfils ``WeightLink``; the other rank counts as this one does, and is lost before weights arrive."""

    def send(self, x: Tensor, rank: int, tag: int) -> "Arrival":
        return LostArrival(self._net, x, (rank, rank, tag))

    def receive(self, x: Tensor, rank: int, tag: int) -> "Arrival":
        return LostArrival(self._net, x, (rank, rank, tag))

    def add(self, x: Tensor) -> Tensor:
        return x


class LostArrival(Arrival):
    def wait(self) -> None:
        raise PeerLostError("a worker has ended")


def test_weights_change_though_the_rank_is_lost_that_would_send_some() -> None:
    net = Net(barrier=threading.Barrier(1))
    rank = Rank(net, 0, EplbConfig(window_size=4, step_interval=4, move_bytes=16))
    rank.balancer.join(LostLink(net, 0))
    for _ in range(5):
        rank.step([90, 80, 70, 1, 1, 1])
    rank.balancer.weights_changed()
    rank.balancer.regroup(SIZE, 0)
    rank.balancer.join(LostLink(net, 0))
    rank.step([90, 80, 70, 1, 1, 1])
    rank.check()


def test_the_window_forgets_earlier_steps() -> None:
    net = Net()
    config = EplbConfig(window_size=3, step_interval=10)

    def work(number: int) -> Rank:
        rank = Rank(net, number, config)
        for step in range(20):
            rank.step([90, 80, 70, 1, 1, 1] if step < 7 else [5] * NUM_EXPERTS)
        return rank

    with ThreadPoolExecutor(SIZE) as threads:
        ranks = list(threads.map(work, range(SIZE)))
    assert ranks[0].history[-1] == ranks[0].history[0]
    assert ranks[0].balancer.stats.balancedness == 1


def test_before_the_ranks_have_joined_nothing_is_counted() -> None:
    balancer = ExpertBalancer(EplbConfig(window_size=1, step_interval=1), SIZE, 0)
    balancer.stepped()
    assert balancer.stats.num_plans == 0
