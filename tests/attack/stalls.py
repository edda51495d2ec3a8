"""Parts that do nothing for some seconds, as if their event loops were busy; no stream may be lost."""

import signal
import time
from functools import partial

import psutil

from tests.attack.attack import Attack, Outcome
from tests.attack.target import Target

SECONDS = 4.0
PARTS = ("gateway", "output_processor", "engine", "tokenizer", "coordinator")


def stall(target: Target, service: str, seconds: float = SECONDS) -> Outcome:
    """Stop a process and let it continue."""
    process = target.process(service)
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        process.send_signal(signal.SIGCONT)
    return Outcome(f"stopped for {seconds:g} s")


ATTACKS = [
    Attack(f"stall-{service.replace('_', '-')}", partial(stall, service=service), pause=SECONDS) for service in PARTS
]
