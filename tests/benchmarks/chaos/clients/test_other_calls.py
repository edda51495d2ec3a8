"""Calls that only one client makes."""

import json
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.chaos.clients.mix import Case
from benchmarks.chaos.clients.other_calls import answer_of, other_cases


def test_they_are_a_function_of_the_seed() -> None:
    cases = other_cases(random.Random(1), 1000, 8, 40)
    assert cases == other_cases(random.Random(1), 1000, 8, 40)
    assert len({case.name for case in cases}) == len(cases) == 20
    assert all(case.call and case.client and not case.streamed for case in cases)


async def test_a_response_in_the_background_is_awaited_and_ids_are_not_compared() -> None:
    states = iter(["queued", "in_progress", "completed"])
    calls: list[tuple[str, str]] = []

    async def send(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        calls.append((method, path))
        return {"id": f"r{len(calls)}", "status": next(states), "usage": {"input_tokens": len(calls), "output": 3}}

    case = Case("", call="POST /v1/responses", options={"background": True})
    assert json.loads(await answer_of(send, case, "m")) == {"status": "completed", "usage": {"output": 3}}
    assert calls == [("POST", "/v1/responses"), ("GET", "/v1/responses/r1"), ("GET", "/v1/responses/r2")]
