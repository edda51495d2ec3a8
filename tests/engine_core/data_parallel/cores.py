"""Cores of a data-parallel group in processes of their own, over the hash worker with experts."""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.helpers import make_config
from tests.engine_core.processes import has_ended, wait_until
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ExpertLoads,
    FinishReason,
    GroupState,
    RequestType,
    SchedulerStats,
    UtilityCall,
)
from tokenloom.engine_core.wire.frames import to_raw
from tokenloom.services.coordinator.engines.data_parallel_groups import WaveStarts

CORE = """
import argparse, os
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.process.core_process import run_engine_core

parser = argparse.ArgumentParser()
parser.add_argument("--handshake")
address = parser.parse_known_args()[0].handshake


def make(config):
    return make_executor(config, lambda config: HashWorker(config, experts_per_token=8))


os._exit(run_engine_core(address, make))
"""


def rank_config(config: EngineConfig, directory: Path, rank: int, size: int = 2) -> EngineConfig:
    """Return the configuration of one rank. The group is at a socket in ``directory``, unless ``config`` says where."""
    parallel = msgspec.structs.replace(
        config.parallel,
        data_parallel_size=size,
        data_parallel_rank=rank,
        data_parallel_address=config.parallel.data_parallel_address or f"unix:{directory}/group",
        data_parallel_timeout=30.0,
    )
    return msgspec.structs.replace(config, parallel=parallel)


def free_port() -> int:
    """Return a port of this host at which a hub may listen."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start_rank(
    directory: Path, rank: int, size: int = 2, *, step_seconds: float = 0.0, **settings: object
) -> SyncMPClient:
    """Start one rank over the hash worker; ``settings`` are those of ``make_config``. It takes requests, and computes
    once its group is complete."""
    script = directory / "core.py"
    script.write_text(CORE)
    config = make_config(**settings)  # type: ignore[arg-type]
    worker = msgspec.structs.replace(config.worker, step_seconds=step_seconds)
    config = msgspec.structs.replace(config, worker=worker)
    return SyncMPClient(rank_config(config, directory, rank, size), command=[sys.executable, str(script)])


class Group:
    """A group whose coordinator is this object: it passes on starts of waves, and collects what the ranks answer."""

    def __init__(
        self,
        directory: Path,
        size: int = 2,
        *,
        config: EngineConfig | None = None,
        has_coordinator: bool = True,
        **settings: object,
    ) -> None:
        """``config``: of ranks that compute a model; without it they run the hash worker with ``settings``. Without a
        coordinator the hub alone passes on starts of waves."""
        self._has_coordinator = has_coordinator
        self._directory, self._settings, self._config = directory, settings, config
        self.ranks: list[SyncMPClient] = []
        self.states: list[GroupState | None] = []
        self.tokens: dict[str, list[int]] = {}
        self.pooled: dict[str, object] = {}
        self._placed: dict[str, tuple[int, EngineCoreRequest]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.expert_loads: dict[int, ExpertLoads] = {}
        self.stats: dict[int, SchedulerStats] = {}
        self.num_waves = 0
        self.num_unanswered = 0
        self._starts = WaveStarts()
        for rank in range(size):
            self.start_rank(rank, size)

    def start_rank(self, rank: int, size: int) -> None:
        """Start another rank, as its number."""
        self.ranks.append(self._start(rank, size))
        self.states.append(None)

    def lose(self, rank: int) -> None:
        """Kill the core of a rank, put another one in its place, and give that the requests that have not ended."""
        client = self.ranks[rank]
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: has_ended(pid), 30.0)
        client.close()
        self._starts.leave(str(rank))
        self.states[rank] = None
        self.ranks[rank] = self._start(rank, len(self.ranks))
        for name, (place, request) in list(self._placed.items()):
            if place == rank and name not in self.ended:
                self.add(rank, request)

    def _start(self, rank: int, size: int) -> SyncMPClient:
        if self._config is None:
            return start_rank(self._directory, rank, size, **self._settings)
        return SyncMPClient(rank_config(self._config, self._directory, rank, size))

    def close_last(self) -> None:
        """End the last rank, which the coordinator asks for nothing from then on."""
        self.ranks.pop().close()
        self.states.pop()
        self._starts.leave(str(len(self.ranks)))

    def add(self, rank: int, request: EngineCoreRequest) -> None:
        self.tokens[request.request_id] = []
        self._placed[request.request_id] = rank, request
        self.ranks[rank].add_request(request)

    def call(self, rank: int, method: str, *args: object) -> None:
        """Call a utility; :meth:`pump` reads its answer."""
        self.num_unanswered += 1
        call = UtilityCall(1000 + self.num_unanswered, method, [to_raw(arg) for arg in args])
        self.ranks[rank]._send(RequestType.UTILITY, call)

    def pump(self, until: Callable[[], bool], seconds: float = 60.0) -> None:
        """Read outputs until a condition holds. Raises ``EngineDeadError`` if a rank ends."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, client in enumerate(self.ranks):
                for outputs in client.take_ready():
                    self._take(rank, outputs)
            if until():
                return
            assert time.monotonic() < deadline, f"{self.states}, {len(self.ended)} of {len(self.tokens)} requests ended"
            if not select.select(self.ranks, [], [], 0.1)[0]:
                for client in self.ranks:
                    client.check_process()

    def finish(self) -> None:
        """Read until all requests have ended."""
        self.pump(lambda: self.ended.keys() == self.tokens.keys())

    def is_resting(self) -> bool:
        """Return whether all ranks are members, and no wave runs."""
        return all(state is not None and state.is_member and state.start_wave is None for state in self.states)

    def close(self) -> None:
        for client in self.ranks:
            client.close()

    def _take(self, rank: int, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.pooled is not None:
                self.pooled[output.request_id] = output.pooled
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        if outputs.expert_loads is not None:
            self.expert_loads[rank] = outputs.expert_loads
        if outputs.scheduler_stats is not None:
            self.stats[rank] = outputs.scheduler_stats
        if outputs.utility_output is not None:
            outputs.utility_output.value()
            self.num_unanswered -= 1
        if (state := outputs.group) is not None:
            self.states[rank] = state
            self.num_waves = max(self.num_waves, 1 + (-1 if state.wave_complete is None else state.wave_complete))
            self._starts.report(str(rank), state.start_wave, state.wave_complete)
            for name, wave in self._starts.due() if self._has_coordinator else ():
                self.ranks[int(name)]._send(RequestType.START_DP_WAVE, wave)
