import re
from concurrent.futures import Future

import msgspec
import pytest

from tokenloom.engine_core.control.core_calls import Utilities
from tokenloom.engine_core.wire.messages import UtilityCall, UtilityOutput
from tokenloom.engine_core.wire.serialization import from_raw, to_raw


class Range(msgspec.Struct):
    low: int
    high: int


def width(range: Range, *, scale: int = 1) -> int:
    return (range.high - range.low) * scale


def fail(error: str) -> None:
    raise RuntimeError(error)


def make_call(method: str, *args: object) -> UtilityCall:
    return UtilityCall(7, method, [to_raw(arg) for arg in args])


def answers_to(call: UtilityCall) -> list[UtilityOutput]:
    answers: list[UtilityOutput] = []
    Utilities({"width": width, "fail": fail}).call(call, answers.append)
    return answers


def test_arguments_become_the_types_that_the_method_annotates() -> None:
    (answer,) = answers_to(make_call("width", Range(2, 5)))
    assert (answer.call_id, from_raw(answer.result), answer.error) == (7, 3, "")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (make_call("eval", "1 + 1"), r"unknown utility 'eval'; use one of fail, width"),
        (make_call("width", {"low": "a", "high": 1}), "width: Expected `int`, got `str`"),
        (make_call("width"), "width: missing a required argument: 'range'"),
        (make_call("fail", "no disk"), "fail: no disk"),
    ],
)
def test_an_error_is_the_answer(call: UtilityCall, error: str) -> None:
    (answer,) = answers_to(call)
    assert answer.call_id == 7
    assert re.match(error, answer.error)


def test_a_future_is_answered_once_it_has_its_result() -> None:
    futures: list[Future[object]] = [Future(), Future()]
    waiting = iter(futures)
    utilities = Utilities({"later": lambda: next(waiting)})
    answers: list[UtilityOutput] = []
    utilities.call(UtilityCall(1, "later", []), answers.append)
    utilities.call(UtilityCall(2, "later", []), answers.append)
    assert not answers
    futures[1].set_result({"a": [1, None]})
    assert [(answer.call_id, from_raw(answer.result)) for answer in answers] == [(2, {"a": [1, None]})]
    futures[0].set_exception(ValueError("too late"))
    assert answers[1].error == "later: too late"
