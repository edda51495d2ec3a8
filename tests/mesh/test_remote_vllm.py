"""An engine of ours beside one for which a server with vLLM's contract computes: placement, replay, refusals."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.dialects import DIALECTS
from tests.mesh.harness import MODEL, SOON, Mesh, Part
from tests.services.engine.core.fake_vllm import FakeVLLM
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.output_processor.placement import engine_search

PROMPT = [1, 2, 3]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def completion(max_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


@asynccontextmanager
async def mesh_of(directory: Path, server: FakeVLLM, *kinds: str, mixed: bool = True) -> AsyncIterator[Mesh]:
    """A mesh with an engine of each of these kinds: ours, or theirs."""
    remote = {"remote_vllm": server.url, "num_kv_blocks": None}

    def settings(index: int) -> dict[str, Any]:
        return remote if kinds[index] == "theirs" else {"hash_step_seconds": 0.002}

    mesh = Mesh(directory, engines=len(kinds), engine=settings, coordinator={"mixed_numerics": mixed})
    async with asyncio.timeout(4 * SOON), mesh.running():
        yield mesh


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM() as server:
        yield server


def ids_of(answer: dict[str, Any]) -> list[int]:
    (choice,) = answer["choices"]
    token_ids: list[int] = choice["token_ids"]
    return token_ids


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110  # of a server in this process, which nobody asks for it
            await asyncio.sleep(0.01)


async def end_of(engine: Part) -> None:
    """Take the failure of an engine whose server was lost, as its supervisor does."""
    assert engine.host is not None
    async with asyncio.timeout(SOON):
        assert "vLLM is lost" in str(await engine.host.failure.take())
    await engine.stop()


def num_engines(mesh: Mesh) -> int:
    service = mesh.coordinator.service
    assert isinstance(service, CoordinatorService)
    assert service.servicer is not None
    return len(service.servicer._registry)


async def mixed_count(mesh: Mesh) -> float:
    (host,) = (part.host for part in mesh.output_processors)
    assert host is not None
    return host.metrics.get_sample_value("tokenloom_output_processor_mixed_numerics_total") or 0.0


async def test_requests_go_to_both_kinds_and_each_answers_all_by_itself(socket_dir: Path, server: FakeVLLM) -> None:
    async with mesh_of(socket_dir, server, "ours", "theirs") as mesh, mesh.http() as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=completion()) for _ in range(12)))
        bodies = [answer.json() for answer in answers]
        assert {tuple(ids_of(body)) for body in bodies} == {tuple(mesh.expected(PROMPT, 40))}
        assert 0 < len(server.bodies) < 12
        assert not any("mixed_numerics" in body for body in bodies)
        assert await mixed_count(mesh) == 0
        await mesh.until_idle()


async def test_a_request_goes_on_at_ours_when_theirs_is_lost_and_its_answer_says_so(
    socket_dir: Path, server: FakeVLLM
) -> None:
    async with mesh_of(socket_dir, server, "theirs", "ours") as mesh, mesh.http() as http:
        server.after = 5
        tasks = [asyncio.create_task(http.post("/v1/completions", json=completion())) for _ in range(4)]
        streamed = asyncio.create_task(_streamed(http, completion(stream=True)))
        # All that went to the other kind wait there for more tokens, and all others have ended.
        await until(lambda: sum(task.done() for task in (*tasks, streamed)) + server.num_open == 5)
        num_begun = server.num_open
        assert num_begun > 0
        await server.kill()
        bodies = [(await task).json() for task in tasks]
        events = await streamed
        expected = mesh.expected(PROMPT, 40)
        assert [ids_of(body) for body in bodies] == [expected] * 4
        assert [token_id for event in events for token_id in ids_of(event)] == expected
        marks = [body.get("mixed_numerics") for body in bodies] + [events[-1].get("mixed_numerics")]
        assert marks.count(True) == num_begun
        assert not any("mixed_numerics" in event for event in events[:-1])
        assert await mixed_count(mesh) == num_begun
        await end_of(mesh.engines[0])


async def test_answers_of_every_form_say_that_both_kinds_computed_them(socket_dir: Path, server: FakeVLLM) -> None:
    async with mesh_of(socket_dir, server, "theirs", "ours") as mesh:
        await mesh.engines[1].stop()  # all begin at the other kind
        server.after = 3
        tasks = {name: asyncio.create_task(ask(mesh, 12)) for name, ask in DIALECTS.items()}
        await until(lambda: server.num_open == len(tasks))
        await mesh.engines[1].start()
        await server.kill()
        found = {name: await task for name, task in tasks.items()}
        assert found == dict.fromkeys(DIALECTS, ("", True))
        assert await mixed_count(mesh) == len(DIALECTS)
        await end_of(mesh.engines[0])
        assert {await ask(mesh, 12) for ask in DIALECTS.values()} == {("", False)}


async def test_the_steps_of_a_beam_search_stay_with_the_kind_of_the_first(socket_dir: Path, server: FakeVLLM) -> None:
    asked = completion(6, use_beam_search=True, n=2)
    del asked["ignore_eos"]
    async with mesh_of(socket_dir, server, "ours", "theirs", mixed=False) as mesh, mesh.http() as http:
        counts = set[int]()
        for _ in range(8):
            server.bodies.clear()
            answer = await http.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            counts.add(len(server.bodies))
        await mesh.engines[0].stop()
        server.bodies.clear()
        assert (await http.post("/v1/completions", json=asked)).status_code == 200
        assert len(server.bodies) > 3
        assert counts <= {0, len(server.bodies)}, "all of a search, or nothing"


async def _streamed(
    http: httpx.AsyncClient, body: dict[str, Any], events: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return all events. ``events``: where they are added as they arrive."""
    events = [] if events is None else events
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


async def test_without_the_option_a_request_waits_for_the_kind_on_which_it_began(
    socket_dir: Path, server: FakeVLLM
) -> None:
    async with mesh_of(socket_dir, server, "theirs", "ours", mixed=False) as mesh, mesh.http() as http:
        await mesh.engines[1].stop()  # the request begins at the other kind
        server.after = 5
        task = asyncio.create_task(http.post("/v1/completions", json=completion()))
        await until(lambda: server.num_open > 0)
        await mesh.engines[1].start()
        await server.kill()
        new = (await http.post("/v1/completions", json=completion())).json()
        assert ids_of(new) == mesh.expected(PROMPT, 40), "a new request is served"
        assert not task.done()
        server.after = None
        await server.start()
        with pytest.raises(Exception):  # noqa: B017  # what had ended it: the server was lost
            await mesh.engines[0].stop()
        await mesh.engines[0].start()
        body = (await task).json()
        assert ids_of(body) == mesh.expected(PROMPT, 40)
        assert "mixed_numerics" not in body
        assert len(server.bodies[-1]["token_ids"]) > len(PROMPT), "its tokens were replayed"


@pytest.mark.parametrize("mixed", [False, True])
async def test_an_output_processor_that_takes_over_knows_on_which_kind_a_request_began(
    socket_dir: Path, server: FakeVLLM, *, mixed: bool
) -> None:
    async with mesh_of(socket_dir, server, "theirs", "ours", mixed=mixed) as mesh, mesh.http() as http:
        (output_processor,) = mesh.output_processors
        await mesh.engines[1].stop()  # the request begins at the other kind
        server.after = 5
        seen: list[dict[str, Any]] = []
        task = asyncio.create_task(_streamed(http, completion(stream=True), seen))
        await until(lambda: len(seen) > 0)
        await server.kill()
        await end_of(mesh.engines[0])
        await output_processor.kill()
        await asyncio.gather(mesh.engines[1].start(), output_processor.start())
        new = (await http.post("/v1/completions", json=completion())).json()
        assert ids_of(new) == mesh.expected(PROMPT, 40), "a new request is served"
        assert "mixed_numerics" not in new
        if not mixed:
            assert not task.done()
            server.after = None
            await server.start()
            await mesh.engines[0].start()
        events = await task
        assert [token_id for event in events for token_id in ids_of(event)] == mesh.expected(PROMPT, 40)
        assert events[-1].get("mixed_numerics", False) == mixed
        assert [len(body["token_ids"]) > len(PROMPT) for body in server.bodies] == [False] + [True] * (not mixed)


async def test_what_only_ours_does_is_never_lost_to_theirs(socket_dir: Path, server: FakeVLLM) -> None:
    unserved = completion(bad_words=["a"])
    async with mesh_of(socket_dir, server, "theirs", "ours") as mesh, mesh.http() as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=unserved) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert not server.bodies
        # A limit is that of the engines that are ours.
        many = await http.post("/v1/completions", json=completion(4, logprobs=20))
        assert many.status_code == 200


async def test_where_there_is_only_theirs_it_is_refused_by_name(socket_dir: Path, server: FakeVLLM) -> None:
    unserved = completion(bad_words=["a"])
    async with mesh_of(socket_dir, server, "theirs") as mesh, mesh.http() as http:
        answer = await http.post("/v1/completions", json=unserved)
        assert answer.status_code == 400
        assert "bad_words" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "engine_lacks"
        assert ids_of((await http.post("/v1/completions", json=completion(4))).json()) == mesh.expected(PROMPT, 4)


async def test_a_constraint_holds_at_theirs_too(socket_dir: Path, server: FakeVLLM) -> None:
    """But one that has begun does not go on there: the server would begin the constraint anew."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    constrained = completion(response_format=form)
    async with mesh_of(socket_dir, server, "theirs") as mesh, mesh.http() as http:
        answer = await http.post("/v1/completions", json=constrained)
        assert answer.status_code == 200, answer.text
        assert json.loads(server.bodies[0]["sampling_params"]["structured_outputs"]["json"]) == SCHEMA
        server.after = 3
        task = asyncio.create_task(http.post("/v1/completions", json=constrained))
        await until(lambda: server.num_open > 0)
        await server.kill()
        await end_of(mesh.engines[0])
        server.after = None
        await server.start()
        await mesh.engines[0].start()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engine_lacks")
        assert "structured outputs after tokens of another engine" in answer.text


async def test_it_waits_for_ours_while_ours_is_lost(
    socket_dir: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    unserved = completion(bad_words=["a"])
    async with mesh_of(socket_dir, server, "theirs", "ours") as mesh, mesh.http() as http:
        assert (await http.post("/v1/completions", json=unserved)).status_code == 200
        await mesh.engines[1].kill()
        await until(lambda: num_engines(mesh) == 1)
        task = asyncio.create_task(http.post("/v1/completions", json=unserved))
        await mesh.engines[1].start()
        answer = await task
        assert answer.status_code == 200, answer.text
        await mesh.engines[1].kill()
        await until(lambda: num_engines(mesh) == 1)
        monkeypatch.setattr(engine_search, "UNFIT_SECONDS", 0.0)
        assert (await http.post("/v1/completions", json=unserved)).status_code == 400
