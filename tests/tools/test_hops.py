"""Calls of several processes are merged, cut at the forward pass and counted."""

import pytest

from tools.figures.hops import (
    Call,
    Function,
    Share,
    count_hops,
    cut,
    process_name,
    read_calls,
    typical,
    without_strays,
)

_ROUTE = Function("services/gateway/app.py", "App.__call__", 10)
_PARSE = Function("services/gateway/app.py", "Body.__init__", 90)
_OTHER_INIT = Function("services/gateway/app.py", "App.__init__", 5)
_FRAMES = Function("services/runtime/frames.py", "decode", 3)
_STEP = Function("engine_core/core.py", "EngineCore.step", 50)
_CORE_EXECUTE = Function("engine_core/core.py", "EngineCore.execute_model", 70)
_EXECUTE = Function("gpu_worker/worker.py", "Worker.execute_model", 8)
_FORWARD = Function("gpu_worker/runner.py", "Runner._forward", 20)


def _call(moment: int, process: str, function: Function, *, resumed: bool = False) -> Call:
    return Call(moment, process, function, resumed)


_CALLS = [
    _call(5, "gateway", _ROUTE),
    _call(12, "gateway", _ROUTE),
    _call(14, "gateway", _PARSE),
    _call(15, "gateway", _OTHER_INIT),
    _call(22, "gateway", _ROUTE, resumed=True),
    _call(18, "gateway", _FRAMES),
    _call(3, "core", _STEP),
    _call(20, "core", _FRAMES),
    _call(30, "core", _STEP),
    _call(31, "core", _CORE_EXECUTE),
    _call(32, "core", _EXECUTE),
    _call(40, "core", _FORWARD),
    _call(41, "core", _FORWARD),
    _call(50, "gateway", _FRAMES),
]


def test_the_road_lies_between_the_request_and_the_first_forward_pass() -> None:
    road = cut(_CALLS, sent=10)
    assert [call.moment for call in road] == [12, 14, 15, 18, 20, 22, 30, 31, 32, 40]


def test_without_a_forward_pass_no_road_ends() -> None:
    with pytest.raises(ValueError, match="no forward pass"):
        cut(_CALLS, sent=42)


def test_shared_functions_and_files_count_once_in_the_total() -> None:
    hops = count_hops(cut(_CALLS, sent=10))
    assert hops.forward == "gpu_worker/runner.py:Runner._forward"
    assert hops.total == Share(calls=10, resumed=1, functions=7, files=5)
    assert hops.processes == {
        "core": Share(calls=5, resumed=0, functions=5, files=4),
        "gateway": Share(calls=5, resumed=1, functions=3, files=2),
    }


def test_the_step_ends_where_the_worker_is_called() -> None:
    hops = count_hops(cut(_CALLS, sent=10))
    assert hops.until_execute.calls == 9
    assert hops.step == Share(calls=3, resumed=0, functions=3, files=2)


def test_the_typical_road_is_the_median_one() -> None:
    stray = _call(11, "core", _FRAMES)
    fewest, middle, most = (count_hops(cut([*_CALLS, *[stray] * extra], sent=10)) for extra in range(3))
    assert typical([most, fewest, middle]) is middle
    assert typical([most, fewest]) is fewest


def test_calls_that_not_three_quarters_of_the_roads_have_are_left_out() -> None:
    tick = Function("services/runtime/clock.py", "Clock.tick", 7)
    road = cut(_CALLS, sent=10)
    with_tick = [_call(11, "gateway", tick), *road]
    with_more = [*road[:2], _call(13, "gateway", _ROUTE), *road[2:]]
    without_last = [*road[:2], with_more[2], *road[2:5], *road[6:]]
    assert without_strays([with_tick, with_tick, road, with_more]) == [road, road, road, without_last]
    assert without_strays([*[with_tick] * 3, road]) == [*[with_tick] * 3, road]


def test_calls_into_other_files_are_left_out() -> None:
    dump: dict[str, list[list[object]]] = {
        "functions": [["/tree/tokenloom/services/a.py", "f", 3], ["/tree/.venv/b.py", "g", 9]],
        "calls": [[7, 0, False], [8, 1, False], [9, 0, True]],
    }
    calls = read_calls("gateway", dump, {"/tree/tokenloom/services/a.py": "services/a.py"})
    function = Function("services/a.py", "f", 3)
    assert calls == [Call(7, "gateway", function, False), Call(9, "gateway", function, True)]


def test_a_process_is_named_after_its_module() -> None:
    assert process_name(["python", "-m", "tokenloom.services.engine.core_main", "--x"]) == "engine.core_main"
    assert process_name(["python", "script.py"]) == "python script.py"
