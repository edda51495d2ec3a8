"""Parts whose event loops do nothing for some seconds; no stream may be lost, and no request refused."""

import signal
import time
from functools import partial

import psutil

from tests.attack.attack import Attack, Outcome
from tests.attack.target import BUSY_SECONDS, Setup, Target

HOOKED = Setup(hook=True)
STOPPED_SECONDS = 1.0
"""Less than the time after which a stopped process counts as dead."""
PARTS = ("gateway", "output_processor", "engine", "tokenizer", "coordinator")


def busy(target: Target, service: str) -> Outcome:
    """Keep the event loop of a process busy."""
    process = target.process(service)
    before = process.cpu_times()
    process.send_signal(signal.SIGUSR2)
    time.sleep(BUSY_SECONDS)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used > 0.5, f"the {service} was not busy"
    return Outcome(f"busy for {BUSY_SECONDS:g} s")


def stopped(target: Target, service: str = "gateway", seconds: float = STOPPED_SECONDS) -> Outcome:
    """Stop a whole process for a moment, as a hypervisor does that moves it."""
    process = target.process(service)
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        process.send_signal(signal.SIGCONT)
    return Outcome(f"stopped for {seconds:g} s")


ATTACKS = [
    *(
        Attack(f"busy-{service.replace('_', '-')}", partial(busy, service=service), HOOKED, pause=BUSY_SECONDS)
        for service in PARTS
    ),
    Attack("stopped-gateway", stopped, HOOKED, pause=STOPPED_SECONDS),
]
