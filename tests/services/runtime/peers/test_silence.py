"""Tests that a silent peer is distinguished from one that ended."""

import grpc
import pytest

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.local_streams.channel import SILENT
from tokenloom.services.runtime.local_streams.socket_end import status
from tokenloom.services.runtime.streams.slotted_stream import PeerSilent, was_silent

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (status(UNAVAILABLE, SILENT), True),
        (status(UNAVAILABLE, "keepalive watchdog timeout"), True),
        (status(UNAVAILABLE, "Socket closed"), False),
        (status(UNAVAILABLE, "the connection to the peer was lost"), False),
        (status(grpc.StatusCode.INTERNAL, "keepalive"), False),
        (PeerSilent("no frame for 3 s"), True),
        (Unavailable("step 3 lasts too long"), False),
    ],
)
def test_only_a_lack_of_any_sign_is_silence(error: BaseException, expected: bool) -> None:
    assert was_silent(error) is expected
