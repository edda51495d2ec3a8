"""What is serialized by hand is what Protocol Buffers serialize."""

import pytest

from tokenloom.request.errors import Unavailable
from tokenloom.request.wire_errors import to_proto
from tokenloom.services.coordinator.picks.placed import Placed, engine_part, error_part
from tokenloom.v1.coordinator_pb2 import EngineIdentity, PickResult, PickResults
from tokenloom.v1.engine_pb2 import SessionTurn


@pytest.mark.parametrize("number", [1, 127, 128, 16_383, 16_384, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("address", ["a:1", "a" * 200, "a" * 20_000])
def test_a_part_is_what_protocol_buffers_serialize(number: int, whole: bool, address: str) -> None:
    engine = EngineIdentity(engine_id="e", epoch=3, address=address)
    placed = Placed(engine, engine_part(engine), whole, (1 << 64) - 2, number)
    assert placed.part() == PickResults(result=[PickResult(response=placed.response())]).SerializeToString()


def test_parts_make_a_message() -> None:
    engine, error = EngineIdentity(engine_id="e"), Unavailable("no engine")
    placed = Placed(engine, engine_part(engine), False, 1, 2)
    results = PickResults.FromString(placed.part() + error_part(error) + placed.part())
    response = PickResult(response=placed.response())
    assert list(results.result) == [response, PickResult(error=to_proto(error)), response]


def test_a_part_names_the_turn_of_a_session() -> None:
    engine = EngineIdentity(engine_id="e", epoch=3)
    turn = SessionTurn(branch=(1 << 64) - 1, return_milliseconds=30_000, past_tokens=9, moved=True)
    placed = Placed(engine, engine_part(engine), True, 1, 2, turn)
    assert PickResults.FromString(placed.part()).result[0].response == placed.response()
    assert placed.response().session == turn
