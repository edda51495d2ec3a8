"""Runs an engine core's process: ``python -m tokenloom.services.engine.core.core_main --handshake ADDRESS``.

A client of the core starts it. The configuration arrives in the handshake; the flags give its address and set up logs.
"""

import os
import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.engine_core.data.config import EngineConfig
    from tokenloom.engine_core.executor.make_executor import make_executor
    from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
    from tokenloom.engine_core.process.core_process import run_engine_core

    from .workers import CORE_COMMAND, WORKER_COMMAND, kv_tls, make_own_worker, make_part_transport, read_flags


def make_transports(config: EngineConfig) -> list[KVTransport]:
    """Return the KV transports that ``config`` names. Raises ``ValueError`` for an unknown one."""
    if not config.kv.transports:
        return []
    from tokenloom.gpu_worker.kv_connector import kv_transports

    kv = config.kv
    return kv_transports.make_transports(
        kv.transports,
        on_host=config.worker.device == "cpu" or config.worker.worker != "model",
        socket_listen=kv.socket_listen,
        socket_advertise=kv.socket_advertise,
        tls=kv_tls(kv.socket_tls),
        plugins=config.plugins,
    )


def main() -> int:
    """Run the core until it ends."""
    arguments = read_flags(__doc__, "--handshake", "engine_core")
    flags = (
        *("--instance-id", arguments.instance_id),
        *("--log-level", arguments.log_level, "--log-format", arguments.log_format),
    )
    status = run_engine_core(
        arguments.handshake,
        lambda config: make_executor(config, make_own_worker, (*WORKER_COMMAND, *flags), make_part_transport),
        make_transports,
        (*CORE_COMMAND, *flags),
    )
    sys.stderr.flush()
    # Do not wait for threads that are blocked in C, such as those that watch signals and the parent.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
