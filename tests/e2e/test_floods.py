"""As many connections as the gateway has descriptors, and many gRPC streams: running streams continue."""

import asyncio
from typing import Any

import pytest

from tests.e2e import floods

DESCRIPTORS = 600
STREAMS = 1000


@pytest.mark.timeout(300)
def test_streams_continue_in_a_flood(serve: Any) -> None:
    served = floods.start(serve, DESCRIPTORS, "--log-level", "info")
    before = {process.pid for process in served.family()}
    seen = asyncio.run(floods.flood(served, connections=700, streams=STREAMS))
    assert seen.canaries_are_right
    assert before <= {process.pid for process in served.family()}, "a process died"
    assert seen.num_descriptors < DESCRIPTORS, "none is left for the mesh"
    assert seen.streams["RESOURCE_EXHAUSTED"] + seen.streams["OPEN"] == STREAMS, seen.streams
    log = served.log.read_text()
    assert "raised the limit of open descriptors" in log
    assert "Traceback" not in log
    assert log.count("refusing connections") <= 1
