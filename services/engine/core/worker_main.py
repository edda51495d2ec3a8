"""Runs a worker's process: ``python -m tokenloom.services.engine.core.worker_main --address ADDRESS``.

The engine core's executor starts it with ``--distributed-executor-backend mp``.
"""

import argparse
import os
import sys

from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.services.runtime.telemetry import logs

from .workers import make_own_worker


def main() -> int:
    """Run the worker until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="ZMQ address of the executor")
    parser.add_argument("--instance-id", default="engine-0", help="name of the engine, for its log")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="human", choices=("human", "json"))
    arguments = parser.parse_args()
    logs.setup("worker", f"{arguments.instance_id}/worker", level=arguments.log_level, style=arguments.log_format)
    status = run_worker(arguments.address, make_own_worker)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
