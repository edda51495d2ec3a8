"""Adapters of experts that are spread over the engines of a group give the tokens that they give on one engine."""

from pathlib import Path

import msgspec
import pytest

from tests.engine_core.data_parallel.cores import Group
from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.parity.ranks.test_data_parallel import EXPERTS, alone
from tests.parity.ranks.test_elastic import EPLB, make_requests, resize
from tests.parity.reference import save_random
from tests.parity.test_lora_experts import LAYOUTS
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.lora import read_adapter_files
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.request.adapter_names import adapter_salt

NAMES = ("all", "dora", "some", "router", "")
"""The adapter of each request; the empty name: none."""
SPREADS: dict[str, ParallelConfig] = {
    "fixed": ParallelConfig(),
    "balanced": ParallelConfig(enable_eplb=True, eplb_config=EPLB),
    "in stages": ParallelConfig(pipeline_parallel_size=2),
    "over workers": ParallelConfig(tensor_parallel_size=2),
}


class OneLoads(Group):
    """A group of which rank 0 alone has loaded adapters."""

    def _start(self, rank, size):  # type: ignore[no-untyped-def]
        if rank:
            assert self._config is not None
            lora = msgspec.structs.replace(self._config.lora, modules=())
            self._config = msgspec.structs.replace(self._config, lora=lora)
        return super()._start(rank, size)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    adapters = [
        f"{name}={save_adapter(tmp_path / name, path, rank=4 + index, seed=index, **LAYOUTS[name])}"
        for index, name in enumerate(NAMES)
        if name
    ]
    return EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        lora=LoraConfig(enable=True, max_loras=3, modules=tuple(adapters)),
    )


def requests_of(config: EngineConfig, num_tokens: int) -> list[EngineCoreRequest]:
    """Return a request for each of ``NAMES``."""
    digests = {name: read_adapter_files(Path(path)).digest for name, path in config.lora.named_paths()} | {"": b""}
    return [
        msgspec.structs.replace(request, adapter=digests[name], cache_salt=adapter_salt(b"", digests[name]))
        for name, request in zip(NAMES, make_requests(len(NAMES), num_tokens), strict=True)
    ]


def expected_of(config: EngineConfig, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Return what one engine answers, of which each adapter makes something else than the model alone does."""
    expected = alone(config, requests)
    plain = [msgspec.structs.replace(each, adapter=b"", cache_salt=b"") for each in requests]
    without = alone(msgspec.structs.replace(config, lora=LoraConfig()), plain)
    for name, request in zip(NAMES, requests, strict=True):
        assert (expected[request.request_id] == without[request.request_id]) == (not name)
    return expected


@pytest.mark.parametrize("kind", SPREADS)
def test_adapters_of_spread_experts(kind: str, config: EngineConfig, socket_dir: Path) -> None:
    """Both ranks have requests with other adapters at the same time, and so other slots; then one of them has none."""
    requests = requests_of(config, 40)
    expected = expected_of(config, requests)
    parallel = msgspec.structs.replace(SPREADS[kind], enable_expert_parallel=True)
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=parallel))
    try:
        assert any(each.startswith("ep") for each in group.ranks[0].ready.numerics.split("/"))
        for index, request in enumerate(requests):
            group.add(index % 2, request)
        group.finish()
        assert group.tokens == expected
        again = [msgspec.structs.replace(each, request_id=f"again-{each.request_id}") for each in requests[:3]]
        for request in again:
            group.add(1, request)
        group.finish()
        assert {name: group.tokens[f"again-{name}"] for name in ("r0", "r1", "r2")} == {
            name: expected[name] for name in ("r0", "r1", "r2")
        }
        if kind == "balanced":
            moved = [loads.balance.num_moved for loads in group.expert_loads.values() if loads.balance is not None]
            assert sum(moved) > 0, "experts have moved by their load"
    finally:
        group.close()


def test_an_engine_computes_for_adapters_that_it_has_not_loaded(config: EngineConfig, socket_dir: Path) -> None:
    """Rank 1 serves a request without an adapter while rank 0 serves those that have some. Then the group grows."""
    requests = requests_of(config, 60)
    expected = expected_of(config, requests)
    parallel = ParallelConfig(enable_expert_parallel=True)
    group = OneLoads(socket_dir, config=msgspec.structs.replace(config, parallel=parallel))
    try:
        for request in requests:
            group.add(int(not request.adapter), request)
        group.pump(lambda: all(len(tokens) > 3 for tokens in group.tokens.values()))
        group.start_rank(2, 3)
        resize(group, 3)
        group.finish()
    finally:
        group.close()
    assert group.tokens == expected
