"""Runs an engine core's process: ``python -m tokenloom.services.engine.core.core_main --handshake ADDRESS``.

A client of the core starts it. The configuration arrives in the handshake; the flags give its address and set up logs.
"""

import os
import sys
from pathlib import Path

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.engine_core.data.config import EngineConfig
    from tokenloom.engine_core.executor.make_executor import make_executor
    from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
    from tokenloom.engine_core.process.core_process import run_engine_core
    from tokenloom.services.runtime.peers.certificate_files import CertificateFiles

    from .workers import CORE_COMMAND, WORKER_COMMAND, make_own_worker, read_flags


def make_transports(config: EngineConfig) -> list[KVTransport]:
    """Return the KV transports that ``config`` names. Raises ``ValueError`` for an unknown one."""
    if not config.kv.transports:
        return []
    from tokenloom.gpu_worker.kv_connector import kv_transports
    from tokenloom.gpu_worker.kv_connector.tcp_socket import TLS

    kv = config.kv
    tls = None
    if (files := kv.socket_tls) is not None:
        from tokenloom.services.runtime.peers.tls import (
            MeshTLS,
        )  # here, because it takes gRPC, which a core has no use for

        mesh = MeshTLS(CertificateFiles(Path(files.ca), Path(files.cert), Path(files.key)))
        tls = TLS(mesh.server_context(), mesh.client_context, files.peer_name)
    return kv_transports.make_transports(
        kv.transports,
        on_host=config.worker.device == "cpu" or config.worker.worker != "model",
        socket_listen=kv.socket_listen,
        socket_advertise=kv.socket_advertise,
        tls=tls,
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
        lambda config: make_executor(config, make_own_worker, (*WORKER_COMMAND, *flags)),
        make_transports,
        (*CORE_COMMAND, *flags),
    )
    sys.stderr.flush()
    # Do not wait for threads that are blocked in C, such as those that watch signals and the parent.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
