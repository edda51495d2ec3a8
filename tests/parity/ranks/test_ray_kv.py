"""Prefill and decode apart, each engine with workers on two machines: Ray nodes of different addresses stand for them.

Every worker serves its part of the KV, and reads its part from the workers of the other engine.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from tests.engine_core.processes import has_ended, wait_until
from tests.gpu_worker.kv_connector.engine_pair import MAKE, Engine, MakeExecutor, Pair, uni
from tests.gpu_worker.parallel.rank_threads import parallel
from tests.mesh.harness import SOON
from tests.parity.ranks.ray_nodes import QUIET, machines
from tests.parity.ranks.test_ranks_kv import GREEDY, NUM_BLOCKS, PROMPT, of
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import ExecutorFailedError, WorkerLostError
from tokenloom.engine_core.data.kv_messages import KVAcquire
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.ray_executor import RayExecutor
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.services.engine.core.workers import make_part_transport, make_worker

pytestmark = QUIET
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
LISTENS: dict[str, Any] = {"socket_listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with machines(*ADDRESSES) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = Engine([])
    engine.add("a", PROMPT, GREEDY)
    tokens = [token for output in engine.run("a") for token in output.new_token_ids]
    engine.core.shutdown()
    return tokens


def on_ray(*shape: int) -> MakeExecutor:
    def make(config: EngineConfig) -> Executor:
        ranks = replace(parallel(*shape), distributed_executor_backend="ray")
        worker = replace(config.worker, device="cpu")
        return make_executor(replace(config, worker=worker, parallel=ranks), make_worker, (), make_part_transport)

    return make


def workers_of(engine: Engine) -> list[psutil.Process]:
    import ray

    executor = engine.core.executor
    assert isinstance(executor, RayExecutor)
    pids: list[int] = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in executor.actors])
    return [psutil.Process(pid) for pid in pids]


def shares_memory(process: psutil.Process) -> bool:
    """Whether a process has a pool that others can map."""
    proc = Path("/proc", str(process.pid))
    opened = [os.readlink(each) for each in (proc / "fd").iterdir() if each.is_symlink()]
    return any("tokenloom-kv" in each for each in (*opened, (proc / "maps").read_text()))


def remote_hosts(process: psutil.Process, ports: set[int]) -> set[str]:
    """Where the connections of a process go that end at one of these ports."""
    return {
        each.raddr.ip
        for each in process.net_connections("tcp")
        if each.raddr and each.raddr.port in ports and each.status == psutil.CONN_ESTABLISHED
    }


def served_ports(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_every_worker_reads_its_part_from_a_worker_of_its_own_over_the_network(
    cluster: Any, expected: list[int]
) -> None:
    pair = Pair(MAKE["tcp"], on_ray(2), on_ray(2), **LISTENS)
    engines = [pair.prefill, pair.decode]
    for engine in engines:
        assert isinstance(engine.core.executor, RayExecutor)
        assert len(set(engine.core.executor.nodes)) == 2
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats, pool = pair.decode.core.scheduler.stats(), pair.decode.core.executor.kv_pool()
    assert stats.kv_bytes_received == {"socket": NUM_BLOCKS * pool.block_bytes}
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (NUM_BLOCKS, {})
    owners, readers = workers_of(pair.prefill), workers_of(pair.decode)
    assert not any(map(shares_memory, (*owners, *readers)))
    assert pool.apart is not None, "the core has a memory of the whole pool"
    found = [remote_hosts(reader, served_ports(owner)) for reader in readers for owner in owners]
    assert [bool(each) for each in found] == [True, False, False, True], "each reads from its own rank alone"
    assert len(set().union(*found)) == 2
    assert set().union(*found) <= set(ADDRESSES)
    assert pair.ask("b", PROMPT[::-1], GREEDY), "connections are used again"
    pair.close()
    assert wait_until(lambda: all(has_ended(each.pid) for each in (*owners, *readers)), SOON)


SHAPES: list[tuple[MakeExecutor, MakeExecutor]] = [
    (on_ray(2), uni),
    (on_ray(1, 2), on_ray(2)),
    (of(2), on_ray(2, 1, 2)),
]


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=["ray-alone", "stages-heads", "processes-tokens"])
def test_engines_that_are_divided_in_other_ways(
    cluster: Any, expected: list[int], prefill: MakeExecutor, decode: MakeExecutor
) -> None:
    pair = Pair(MAKE["tcp"], prefill, decode, **LISTENS)
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats = pair.decode.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (NUM_BLOCKS, {})
    pair.close()


@pytest.mark.parametrize(
    ("failpoint", "reason"),
    [("torn_copy=1", "checksum"), ("lease_expires=1", "lease_expired"), ("copy_fails=1", "transport")],
)
def test_what_fails_on_the_way_costs_a_recompute(
    cluster: Any, expected: list[int], failpoint: str, reason: str
) -> None:
    pair = Pair(MAKE["tcp"], on_ray(2), on_ray(2), failpoints=(failpoint,), **LISTENS)
    assert pair.ask("a", PROMPT, GREEDY) == expected
    assert pair.decode.core.scheduler.stats().kv_recomputes == {reason: 1}
    pair.close()


def test_a_worker_of_the_owner_that_dies_costs_a_recompute(cluster: Any, expected: list[int]) -> None:
    pair = Pair(MAKE["tcp"], on_ray(2), on_ray(2), **LISTENS)
    tokens, outputs = _decode_after(pair, lambda: workers_of(pair.prefill)[1].kill())
    assert tokens + outputs == expected
    assert pair.decode.core.scheduler.stats().kv_recomputes == {"transport": 1}
    with pytest.raises(WorkerLostError):
        pair.prefill.core.check_health()
    pair.close()


def test_a_worker_of_the_reader_that_dies_ends_its_engine(cluster: Any) -> None:
    pair = Pair(MAKE["tcp"], on_ray(2), on_ray(2), **LISTENS)
    with pytest.raises(ExecutorFailedError):
        _decode_after(pair, lambda: workers_of(pair.decode)[1].kill())
    pair.close()


def _decode_after(pair: Pair, happens: Callable[[], None]) -> tuple[list[int], list[int]]:
    """The tokens of both engines, if this happens between them."""
    pair.prefill.add("a", PROMPT, GREEDY, lease_id=b"a")
    (output,) = pair.prefill.run("a")
    layout, digest = pair.decode.core.ready.kv_layout, prompt_digest(PROMPT, b"")
    answer = pair.prefill.answer(KVAcquire(1, b"a", layout, digest, [pair.prefill.transport]))
    happens()
    accepted = output.new_token_ids
    pair.decode.add("a", PROMPT, GREEDY, accepted_token_ids=accepted, remote_kv=answer.target)
    outputs = pair.decode.run("a", lambda: pair.decode.service.run() and None)  # type: ignore[union-attr]
    return accepted, [token for each in outputs for token in each.new_token_ids]


def test_without_an_address_the_workers_share_memory_and_a_machine(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.engine_core.executor.ray_cluster._PLACEMENT_SECONDS", 1.0)
    with pytest.raises(ExecutorFailedError, match="with kv_transports socket and kv_socket_listen they may be on"):
        Engine(MAKE["unix"](), on_ray(2, 2))
