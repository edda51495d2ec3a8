"""Runs a worker's process: ``python -m tokenloom.services.engine.core.worker_main --address ADDRESS``.

The engine core's executor starts it with ``--distributed-executor-backend mp``.
"""

import os
import sys

from tokenloom.engine_core.executor.worker_process import run_worker

from .workers import make_own_worker, read_flags


def main() -> int:
    """Run the worker until it ends."""
    arguments = read_flags(__doc__, "--address", "worker")
    status = run_worker(arguments.address, make_own_worker)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
