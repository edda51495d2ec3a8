"""An Add becomes a message that the core can be sent, or is refused by name."""

from random import Random

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.services.engine.peer import make_add
from tokenloom.engine_core.data.messages import EngineCoreRequest, SessionTurn
from tokenloom.engine_core.wire.frames import Decoder, encode
from tokenloom.request.errors import DeadlineExceeded, InvalidArgument
from tokenloom.services.engine.records.core_request import to_core_request
from tokenloom.v1 import engine_pb2, types_pb2

LIMITS = types_pb2.ModelLimits(max_model_len=100, vocab_size=100, max_logprobs=20)
POOLING = types_pb2.ModelLimits(
    max_model_len=100, vocab_size=100, max_logprobs=20, pooling_tasks=[types_pb2.POOLING_TASK_EMBED]
)
CENTURY = 100 * 365 * 24 * 3600


@pytest.mark.parametrize(
    ("timeout", "nanoseconds"),
    [
        (Duration(nanos=1), 1),
        (Duration(seconds=CENTURY), 10**18),
        (Duration(seconds=2**64 // 10**9 + 1), 10**18),
        (Duration(seconds=2**63 - 1, nanos=2**31 - 1), 10**18),
    ],
)
def test_a_timeout_of_any_length_fits_into_the_message(timeout: Duration, nanoseconds: int) -> None:
    request = to_core_request(make_add(1, [1, 2], timeout=timeout), "key", LIMITS, Random(0))
    assert Decoder(EngineCoreRequest).decode(encode(request)).timeout_ns == nanoseconds


@pytest.mark.parametrize("timeout", [Duration(), Duration(seconds=-1), Duration(seconds=-(2**63))])
def test_a_timeout_that_is_over_is_refused(timeout: Duration) -> None:
    with pytest.raises(DeadlineExceeded):
        to_core_request(make_add(1, [1, 2], timeout=timeout), "key", LIMITS, Random(0))


@pytest.mark.parametrize("task", [types_pb2.POOLING_TASK_CLASSIFY, 77, 2**31 - 1])
def test_a_pooling_task_that_the_model_has_not_is_named(task: types_pb2.PoolingTask) -> None:
    add = make_add(1, [1, 2], sampling_params=None, pooling_params=types_pb2.PoolingParams(task=task))
    with pytest.raises(InvalidArgument, match="is not among this model's pooling tasks: embed"):
        to_core_request(add, "key", POOLING, Random(0))


def test_the_turn_of_a_session_reaches_the_core() -> None:
    turn = engine_pb2.SessionTurn(branch=(1 << 64) - 1, return_milliseconds=(1 << 32) - 1, past_tokens=5)
    request = to_core_request(make_add(1, [1, 2], session=turn), "key", LIMITS, Random(0))
    decoded = Decoder(EngineCoreRequest).decode(encode(request))
    assert decoded.session == SessionTurn((1 << 64) - 1, ((1 << 32) - 1) * 1_000_000)
    assert to_core_request(make_add(1, [1, 2]), "key", LIMITS, Random(0)).session is None
