"""Runs cores in processes of their own and waits for them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenloom.engine_core.client.core_client import CoreClient
from tokenloom.engine_core.data.messages import EngineCoreOutput

FAILING_CORE = """
import argparse, os, sys
from tokenloom.engine_core.process.core_process import run_engine_core
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output):
        if scheduler_output.scheduled_new_reqs:
            {failure}
        super().execute_model(scheduler_output)

parser = argparse.ArgumentParser()
parser.add_argument("--handshake")
sys.stderr = open(os.devnull, "w")
os._exit(run_engine_core(parser.parse_known_args()[0].handshake, lambda config: UniProcExecutor(FailingWorker(config))))
"""


def failing_core(directory: Path, failure: str) -> list[str]:
    """Return the command of a core whose worker runs ``failure`` in the first step of a request."""
    script = directory / "core.py"
    script.write_text(FAILING_CORE.format(failure=failure))
    return [sys.executable, str(script)]


def collect(client: CoreClient, count: int) -> dict[str, EngineCoreOutput]:
    """Read until ``count`` requests have ended. Returns their last outputs, with all of their tokens."""
    token_ids: dict[str, list[int]] = {}
    ended: dict[str, EngineCoreOutput] = {}
    while len(ended) < count:
        for output in client.get_output().outputs:
            token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                output.new_token_ids = token_ids[output.request_id]
                ended[output.request_id] = output
    return ended


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or while it was read
        return True


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll until the condition holds. Returns False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
