"""Makes the worker that a configuration names."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenloom.engine_core.data.config import EngineConfig, TLSFiles
from tokenloom.engine_core.data.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    WorkerTimes,
)
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.engine_core.kv_transfer.pool_parts import PartTransport
from tokenloom.process.uncollected_imports import uncollected_imports
from tokenloom.services.runtime.telemetry import logs

if TYPE_CHECKING:
    from tokenloom.gpu_worker.kv_connector.tcp_socket import TLS

WORKER_COMMAND = (sys.executable, "-m", "tokenloom.services.engine.core.worker_main")
"""Starts a worker's process; the executor appends ``--address ADDRESS``."""
CORE_COMMAND = (sys.executable, "-m", "tokenloom.services.engine.core.core_main")
"""Starts the process of a core."""


Maker = Callable[[EngineConfig], Worker]


class TracedWorker:
    """Stands for a worker, and says how long the halves of each step take. It exists only where steps are traced."""

    def __init__(self, worker: Worker, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """``clock`` returns nanoseconds."""
        self._worker = worker
        self._clock = clock
        self._forward_ns = 0

    def __getattr__(self, name: str) -> Any:
        """Return what the worker itself has: all but the two halves of a step."""
        return getattr(self._worker, name)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        began = self._clock()
        self._worker.execute_model(scheduler_output)
        self._forward_ns = self._clock() - began

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        began, forward_ns = self._clock(), self._forward_ns
        output = self._worker.sample_tokens(grammar)

        def timed(output: ModelRunnerOutput) -> ModelRunnerOutput:
            if output.times is None:  # a promise is kept once, and may be asked for it again
                output.times = WorkerTimes(forward_ns, self._clock() - began)
            return output

        return timed(output) if isinstance(output, ModelRunnerOutput) else _TimedOutput(output, timed)


class _TimedOutput:
    """Promises what another promise brings, with its times."""

    def __init__(self, pending: PendingOutput, timed: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        self._pending = pending
        self._timed = timed

    def result(self) -> ModelRunnerOutput:
        return self._timed(self._pending.result())


def read_flags(doc: str | None, address: str, name: str) -> argparse.Namespace:
    """Read the flags of a process of an engine, and set up its log as that of its part ``name``. ``address``: the flag
    that names the address of the process that started it."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(address, required=True, help="ZMQ address of the process that starts this one")
    parser.add_argument("--instance-id", default="engine-0", help="name of the engine, for its log")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="human", choices=("human", "json"))
    flags = parser.parse_args()
    part = f"{flags.instance_id}/{name.removeprefix('engine_')}"
    logs.setup(name, part, level=flags.log_level, style=flags.log_format)
    return flags


def make_worker(config: EngineConfig) -> Worker:
    """Return the worker that ``config`` names. Raises ``ValueError`` for an unknown one."""
    return _traced(config, _import_maker(config)(config))


def make_own_worker(config: EngineConfig) -> Worker:
    """Return the worker of a process that starts for it; :func:`make_worker` also serves programs of users."""
    # `import torch` takes 1.86 to 2.13 s of CPU in this way instead of 2.17 to 2.33 s.
    with uncollected_imports():
        make = _import_maker(config)
    return _traced(config, make(config))


def _traced(config: EngineConfig, worker: Worker) -> Worker:
    # The executor of simulated devices keeps their time itself.
    if not config.observability.trace_steps or config.worker.worker == "timed":
        return worker
    return cast("Worker", TracedWorker(worker))


def kv_tls(files: TLSFiles | None) -> "TLS | None":
    """Return what secures connections that carry KV, from the files of a certificate."""
    if files is None:
        return None
    # Here, because it takes gRPC, which a core has no use for.
    from tokenloom.gpu_worker.kv_connector.tcp_socket import TLS
    from tokenloom.services.runtime.peers.certificate_files import CertificateFiles
    from tokenloom.services.runtime.peers.tls import MeshTLS

    mesh = MeshTLS(CertificateFiles(Path(files.ca), Path(files.cert), Path(files.key)))
    return TLS(mesh.server_context(), mesh.client_context, files.peer_name)


def make_part_transport(config: EngineConfig, host: str) -> PartTransport:
    """Return what serves the part of a KV pool that a worker at this address keeps, on a port that the system chooses.

    Raises ``ValueError`` if ``host`` is not this machine's loopback and the configuration names no certificate.
    """
    from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

    return SocketTransport(f"[{host}]:0" if ":" in host else f"{host}:0", tls=kv_tls(config.kv.socket_tls))


def _import_maker(config: EngineConfig) -> Maker:
    match config.worker.worker:
        case "model":
            # Imported here because importing torch takes seconds, and the other workers do not need it.
            from tokenloom.gpu_worker.devices import make_worker as make_model_worker

            return make_model_worker
        case "hash":
            from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

            return HashWorker
        case "timed":
            from tokenloom.engine_core.fake_workers.timed_worker import TimedWorker

            return TimedWorker
        case name:
            raise ValueError(f"worker: {name!r} is unknown; use one of model, hash, timed")
