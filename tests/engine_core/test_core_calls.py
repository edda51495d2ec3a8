import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from tests.engine_core.executor.ranks import make_ranked_core
from tests.engine_core.helpers import finish, make_config, make_core, make_request
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.core_calls import CoreCalls, Utilities, methods_of
from tokenloom.engine_core.data.errors import ExecutorFailedError, RanksDifferError
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.wire.frames import from_raw, to_raw


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


@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_a_request_that_cannot_be_added_fails_alone(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    core = make_core()
    calls, add = CoreCalls(core), core.scheduler.add_request

    def fail(request: object) -> None:
        if where == "after":
            add(cast(EngineCoreRequest, request))
        raise RuntimeError("can't start new thread")

    assert calls.add(make_request("a", [1], 3)) is None
    with monkeypatch.context() as patch:
        if where == "within":
            patch.setattr(core.scheduler.waiting, "append", fail)
        else:
            patch.setattr(core.scheduler, "add_request", fail)
        refusal = calls.add(make_request("b", [2], 3))
    assert refusal is not None
    (output,) = refusal.outputs
    assert (output.request_id, output.finish_reason) == ("b", FinishReason.ERROR)
    assert (output.error, output.error_kind) == ("the engine could not take the request", ErrorKind.INTERNAL)
    assert list(finish(core)) == ["a"]
    check_idle(core.scheduler)


def test_a_request_that_cannot_take_its_first_tokens_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    calls = CoreCalls(core)
    for request_id in "ab":
        assert calls.add(make_request(request_id, [1], 3)) is None
    monkeypatch.setattr(core.scheduler, "accept_tokens", fail_for("b"))
    assert calls.accept(AcceptTokens("a", [1])) is None
    ended = calls.accept(AcceptTokens("b", [1]))
    assert ended is not None
    (output,) = ended.outputs
    assert (output.request_id, output.finish_reason) == ("b", FinishReason.ERROR)
    assert (output.error, output.error_kind) == (
        "the engine could not take the request's first tokens",
        ErrorKind.INTERNAL,
    )
    assert list(finish(core)) == ["a"]
    check_idle(core.scheduler)


@pytest.mark.parametrize("runs", [True, False])
def test_requests_end_although_ending_one_of_them_meets_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: bool
) -> None:
    core = make_core()
    calls = CoreCalls(core)
    for request_id in "abcd":
        assert calls.add(make_request(request_id, [1], 3)) is None
    if runs:
        core.step()
    live = core.scheduler._live
    fail, remove = fail_for("b"), live.remove
    monkeypatch.setattr(live, "remove", lambda request: (remove(request), fail(request)))
    calls.abort(["a", "b", "c"])
    assert "request b did not end as it should" in caplog.text
    assert list(finish(core)) == ["d"]


def fail_for(request_id: str, otherwise: Callable[[Any], object] | None = None) -> Callable[[Any], None]:
    """Return what fails for one request, and does ``otherwise`` for the others."""

    def call(request: Any) -> None:
        if request.request_id == request_id:
            raise KeyError("a bug")
        if otherwise is not None:
            otherwise(request)

    return call


class Recorder(HashWorker):
    """Records between two calls, as a worker's profiler does."""

    records = False

    def profile(self, start: bool, prefix: str = "") -> None:
        if self.records is start:
            raise ValueError("recording already" if start else "nothing is being recorded")
        self.records = start


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_records_if_one_cannot(rank: int, by_name: bool) -> None:
    recorders = [Recorder(make_config()) for _ in range(2)]
    core, ranks = make_ranked_core(make_config(), *recorders)
    methods = methods_of(core)

    def profile(start: bool) -> None:
        if by_name:
            methods["collective_rpc"]("profile", [start])
        else:
            methods["profile"](start)

    for failure in (ValueError("no directory"), ExecutorFailedError("the disk is full")):
        ranks.failures[rank, "profile"] = failure
        with pytest.raises(RanksDifferError, match=str(failure)):
            profile(True)
        assert not any(recorder.records for recorder in recorders)
    ranks.failures.clear()
    profile(True)
    assert all(recorder.records for recorder in recorders)
    profile(False)
    assert not any(recorder.records for recorder in recorders)
    with pytest.raises(ValueError, match="nothing is being recorded"):
        profile(False)
