"""The canary: an innocent greedy stream of another key, which an attack must not disturb."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.attack.target import MODEL, Target

MAX_GAP_SECONDS = 0.1
"""The longest wait for a token that a user may notice, on a quiet machine."""
_SCRIPT = Path(__file__).with_name("canary_process.py")


@dataclass(frozen=True)
class Report:
    """What the canary saw since its last report.

    Attributes:
        texts: How many whole texts it read.
        gap: Most seconds between a request or a token and the next token.
        errors: What went wrong, in words; a text unlike the first one counts.
    """

    texts: int
    gap: float
    errors: list[str]


class Canary:
    """Holds the process that streams."""

    def __init__(self, target: Target, tokens: int) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0}
        key = target.keys[1] if target.keys else ""
        command = (sys.executable, str(_SCRIPT), target.host, str(target.port), key, json.dumps(body))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_streaming(self) -> None:
        """Wait for a token, so that what happens next happens amid a text."""
        self._ask("streaming")

    def report(self) -> Report:
        """Return what happened since the last report, once a text that begins now has ended."""
        return Report(**json.loads(self._ask("report")))

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def running_canary(target: Target, tokens: int = 200) -> Iterator[Canary]:
    """Keep a canary streaming; its first text has been read when the block begins."""
    canary = Canary(target, tokens)
    try:
        first = canary.report()
        assert first.texts, f"the canary cannot stream: {first.errors}"
        yield canary
    finally:
        canary.stop()
