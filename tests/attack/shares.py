"""One key that takes as much as it can get; the others must be served as before."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.attack.attack import Attack, Outcome
from tests.attack.h2 import Http2
from tests.attack.target import MODEL, Target
from tests.attack.wire import Wire, post, request
from tokenloom.v1 import inference_pb2, types_pb2

PROBES = 100
MAX_RATIO = 2.0
"""p99 of the time to the first token, beside what it is without the attack."""
MIN_RUNNING = 32
"""With fewer, there is no load."""
_STREAMS_A_CONNECTION = 100


def _ttft(target: Target) -> tuple[int, float]:
    """Return the status, and the seconds until the first token, of a request of the other key."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1, "stream": True}
    data = post(target, json.dumps(body).encode(), key=target.neighbour)
    with Wire(target) as wire:
        began = time.monotonic()
        wire.send(data)
        status, at = wire.first_byte()
        return status, at - began


def _p99(target: Target, probes: int) -> tuple[float, list[str]]:
    """Return the p99 of so many requests in sequence, in seconds, and what was wrong."""
    answers = [_ttft(target) for _ in range(probes)]
    refused = [status for status, _ in answers if status != 200]
    wrong = [f"{len(refused)} of {probes} requests of the other key were answered with {refused[0]}"] if refused else []
    return sorted(seconds for _, seconds in answers)[int(probes * 0.99) - 1], wrong


def _compare(calm: float, loaded: float, summary: str, wrong: list[str]) -> Outcome:
    late = []
    if loaded > MAX_RATIO * calm:
        late.append(f"p99 TTFT of the other key rose from {calm * 1e3:.0f} to {loaded * 1e3:.0f} ms")
    return Outcome(f"{summary}; p99 TTFT {calm * 1e3:.0f} to {loaded * 1e3:.0f} ms", wrong, late)


@contextmanager
def many_samples(target: Target, requests: int) -> Iterator[list[int]]:
    """Keep so many requests with n=128 and logprobs=20 running during the block; the statuses grow meanwhile."""
    body = {"model": MODEL, "prompt": "Once", "n": 128, "logprobs": 20, "max_tokens": 400, "ignore_eos": True}
    data = post(target, json.dumps(body).encode(), key=target.key)
    statuses: list[int] = []
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            with Wire(target) as wire:
                wire.send(data)
                while not over.is_set():
                    if wire.is_closed(0.1):
                        statuses.append(wire.status)
                        break
            if statuses and statuses[-1] != 200:
                over.wait(0.1)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(requests)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join()


def samples(target: Target, requests: int = 8, probes: int = PROBES) -> Outcome:
    """Generate 128 samples with 20 log probabilities each, again and again, with one key."""
    calm, _ = _p99(target, probes)
    with many_samples(target, requests) as statuses:
        time.sleep(1.0)
        running = target.running_requests()
        loaded, wrong = _p99(target, probes)
    assert running > MIN_RUNNING, f"only {running} requests ran, and the answers were {statuses}"
    summary = f"{running} run, {len(statuses) - statuses.count(200)} refused"
    return _compare(calm, loaded, summary, wrong)


def large_answer(target: Target) -> Outcome:
    """Wait for one whole answer of 128 samples with 20 log probabilities, not streamed."""
    body = {"model": MODEL, "prompt": "Once", "n": 128, "logprobs": 20, "max_tokens": 1200, "ignore_eos": True}
    with Wire(target) as wire:
        wire.send(post(target, json.dumps(body).encode(), key=target.key))
        status, answer = wire.answer()
    wrong = [] if status in (200, 400, 429) else [f"answered with {status}"]
    return Outcome(f"{status}, {len(answer) / 1e6:.0f} MB", wrong)


def idle_sessions(target: Target, num: int = 1200, probes: int = PROBES) -> Outcome:
    """Open sessions with one key, have one turn of each answered, and leave them idle."""
    calm, _ = _p99(target, probes)
    links = [Http2(target.grpc, target.key) for _ in range(-(-num // _STREAMS_A_CONNECTION))]
    try:
        for link in links:
            link.open_streams(_STREAMS_A_CONNECTION, _turn())
        deadline = time.monotonic() + 60.0
        while sum(len(link.answered | link.ended) for link in links) < num and time.monotonic() < deadline:
            time.sleep(0.05)
        ended, answered = sum(len(link.ended) for link in links), sum(len(link.answered) for link in links)
        loaded, wrong = _p99(target, probes)
        wrong += _own_session(target)
    finally:
        for link in links:
            link.close()
    assert answered, "no session was answered, so none is idle"
    return _compare(calm, loaded, f"{answered} idle, {ended} refused", wrong)


def _turn() -> bytes:
    """Return the first turn of a session."""
    params = types_pb2.SamplingParams(max_tokens=1)
    return inference_pb2.GenerateRequest(model=MODEL, text="Once", sampling_params=params).SerializeToString()


def _own_session(target: Target) -> list[str]:
    """Open a session with the other key."""
    with Http2(target.grpc, target.neighbour) as link:
        link.open_streams(1, _turn())
        deadline = time.monotonic() + 30.0
        while not link.answered and not link.ended and not link.gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return [] if link.answered else ["a session of the other key was refused"]


def after(target: Target) -> Outcome:
    """Ask with the attacker's key once it has stopped: its shares must be free again."""
    status, answer = request(target, target.key, model=MODEL, prompt="Once", max_tokens=1)
    return Outcome(str(status), wrong=[] if status == 200 else [f"answered with {status}: {answer}"])


ATTACKS = [
    Attack("large-answer", large_answer),
    Attack("idle-sessions", idle_sessions),
    Attack("many-samples", samples),
    Attack("after-the-load", after),
]
