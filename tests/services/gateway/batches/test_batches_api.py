"""``/v1/batches``, from a file of requests to the files of results."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.files.disk import Disk
from tokenloom.services.gateway.records.generate_request import SHEDDABLE_PRIORITY
from tokenloom.v1 import types_pb2

COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hi", "max_tokens": 400, **body}}


async def upload(http: httpx.AsyncClient, *lines: dict[str, Any] | str) -> str:
    """Upload lines and return the id of the file."""
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    response = await http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def create(http: httpx.AsyncClient, file_id: str, **fields: Any) -> dict[str, Any]:
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    response = await http.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    batch: dict[str, Any] = response.json()
    return batch


async def until(
    http: httpx.AsyncClient, batch: dict[str, Any], is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait for a state of the batch and return it."""
    async with asyncio.timeout(SOON):
        while not is_so(batch := (await http.get(f"/v1/batches/{batch['id']}")).json()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return batch


async def ended(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    return await until(http, batch, lambda each: each["status"] in ("completed", "failed", "expired", "cancelled"))


async def results(http: httpx.AsyncClient, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of results by ``custom_id``; each id is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in (await http.get(f"/v1/files/{file_id}/content")).text.splitlines()]
    assert len({each["id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


@pytest.fixture
async def mesh(socket_dir: Path, tmp_path: Path) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path / "batches", batch_concurrency=4) as mesh:
        yield mesh


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


async def test_every_line_gets_one_result(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hi"]
    file_id = await upload(
        http,
        *(line(f"good-{index}") for index in range(10)),
        "",
        "{",
        line("wrong-url", "/v1/chat/completions"),
        line("wrong-field", max_tokens=-1),
        line("streams", stream=True),
        line("good-0"),
        {"custom_id": "no-body", "method": "POST", "url": COMPLETIONS},
        {**line("get"), "method": "GET"},
        {**line("array"), "body": [1]},
        line("x" * 600),
        '{"custom_id":"deep","url":"/v1/completions","body":' + "[" * 5000,
        line("wrong-model", model="other"),
    )
    metadata = {"for": "me"}
    batch = await create(http, file_id, metadata=metadata)
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", metadata)
    batch = await ended(http, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 21, "completed": 10, "failed": 11}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    answers = await results(http, batch["output_file_id"])
    assert answers.keys() == {f"good-{index}" for index in range(10)}
    response = answers["good-3"]["response"]
    assert (response["status_code"], response["body"]["choices"][0]["text"]) == (200, "Hi")
    assert response["request_id"]
    text = (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text
    failures = [json.loads(each) for each in text.splitlines()]
    assert len(failures) == 11
    codes = [each["error"]["code"] for each in failures if each["error"]]
    assert sorted(codes) == [
        *("duplicate_custom_id", "invalid_body", "invalid_body", "invalid_custom_id", "invalid_json_line"),
        *("invalid_json_line", "invalid_method", "invalid_request", "mismatched_url"),
    ]
    answered = {each["custom_id"]: each["response"] for each in failures if each["response"]}
    assert answered["wrong-field"]["status_code"] == 400
    assert answered["wrong-field"]["body"]["error"]["param"] == "max_tokens"
    assert answered["wrong-model"]["status_code"] == 404
    metrics = (await http.get("/metrics")).text
    assert 'tokenloom_batch_lines_total{outcome="completed"} 10.0' in metrics
    assert 'route="/v1/batches/*/line",status="200"} 10.0' in metrics
    names = {each["filename"] for each in (await http.get("/v1/files?purpose=batch_output")).json()["data"]}
    assert names == {f"{batch['id']}_output.jsonl", f"{batch['id']}_errors.jsonl"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
async def test_the_other_endpoints(
    mesh: FakeMesh, http: httpx.AsyncClient, endpoint: str, body: dict[str, Any]
) -> None:
    mesh.outputs.auto = ["Hi"]
    file_id = await upload(http, {"custom_id": "1", "method": "POST", "url": endpoint, "body": body})
    batch = await ended(http, await create(http, file_id, endpoint=endpoint))
    answer = (await results(http, batch["output_file_id"]))["1"]["response"]["body"]
    alone = (await http.post(endpoint, json=body)).json()
    assert answer.keys() == alone.keys()


async def test_lines_in_flight_are_bounded_and_give_way(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    batch = await create(http, await upload(http, *(line(str(index)) for index in range(6))))
    begun = [await mesh.outputs.next_request() for _ in range(4)]
    assert mesh.outputs.requests.empty()
    assert "tokenloom_batch_lines_in_flight 4.0" in (await http.get("/metrics")).text
    for request in begun:
        request.answer("x")
    for _ in range(2):
        (await mesh.outputs.next_request()).answer("x")
    assert (await ended(http, batch))["request_counts"]["completed"] == 6


async def test_a_line_that_is_refused_for_load_is_sent_again(socket_dir: Path, tmp_path: Path) -> None:
    options = {"batch_dir": tmp_path / "batches", "max_live_requests": 1}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http() as http:
        live = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 4}))
        request = await mesh.outputs.next_request()
        batch = await create(http, await upload(http, line("1")))
        async with asyncio.timeout(SOON):
            while "lines_postponed_total 1.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        request.answer("x")
        assert (await live).status_code == 200
        mesh.outputs.auto = ["x"]
        assert (await ended(http, batch))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_line_with_a_deadline_for_its_first_token_is_an_error(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    batch = await ended(http, await create(http, await upload(http, line("1", ttft_deadline=0.01))))
    (result,) = (await results(http, batch["error_file_id"])).values()
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["param"] == "ttft_deadline"


async def test_cancelling_keeps_the_answers(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    batch = await create(http, await upload(http, *(line(str(index)) for index in range(9))))
    requests = [await mesh.outputs.next_request() for _ in range(4)]
    requests[0].answer("x")
    await until(http, batch, lambda each: each["request_counts"]["completed"] == 1)
    cancelled = (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert cancelled["status"] in ("cancelling", "cancelled")
    batch = await ended(http, batch)
    assert batch["status"] == "cancelled"
    assert len(await results(http, batch["output_file_id"])) == 1
    await asyncio.wait_for(requests[1].cancelled.wait(), SOON)
    again = await http.post(f"/v1/batches/{batch['id']}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_file_in_use_stays(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    file_id = await upload(http, line("1"))
    batch = await create(http, file_id)
    request = await mesh.outputs.next_request()
    assert (await http.delete(f"/v1/files/{file_id}")).status_code == 400
    request.answer("x")
    await ended(http, batch)
    assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200


async def test_another_key_sees_nothing(socket_dir: Path, tmp_path: Path) -> None:
    options = {"batch_dir": tmp_path / "b", "api_key": ("a", "b")}
    headers = {key: {"Authorization": f"Bearer {key}"} for key in "ab"}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=headers["a"]) as http:
        mesh.outputs.auto = ["x"]
        file_id = await upload(http, line("1"))
        batch = await ended(http, await create(http, file_id))
        assert [each["id"] for each in (await http.get("/v1/batches")).json()["data"]] == [batch["id"]]
        assert (await http.get("/v1/batches", headers=headers["b"])).json()["data"] == []
        assert (await http.get(f"/v1/batches/{batch['id']}", headers=headers["b"])).status_code == 404
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=body, headers=headers["b"])).status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, None),
    ],
)
async def test_wrong_bodies(http: httpx.AsyncClient, change: dict[str, Any], field: str | None) -> None:
    file_id = await upload(http, line("1"))
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h", **change}
    response = await http.post("/v1/batches", json=body)
    assert response.status_code in (400, 404), response.text
    assert field is None or response.json()["error"]["param"] == field


@pytest.mark.parametrize(("text", "code"), [("\n \n", "empty_file"), ("x\n" * 6, "too_many_lines")])
async def test_files_that_are_no_batch(socket_dir: Path, tmp_path: Path, text: str, code: str) -> None:
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path, max_batch_lines=5) as mesh, mesh.http() as http:
        batch = await ended(http, await create(http, await upload(http, text)))
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", code)
        assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


async def test_an_input_that_was_damaged_runs_no_batch(socket_dir: Path, tmp_path: Path) -> None:
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path) as mesh, mesh.http() as http:
        file_id = await upload(http, line("1"), line("2"))
        path = tmp_path / "files" / file_id
        path.write_bytes(path.read_bytes().replace(b'"1"', b'"7"'))
        batch = await ended(http, await create(http, file_id))
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "damaged_file")
        assert batch["output_file_id"] is None


async def test_the_next_gateway_resumes(socket_dir: Path, tmp_path: Path) -> None:
    options = {"batch_dir": tmp_path / "batches", "batch_concurrency": 2, "drain_timeout": 0.1}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http() as http:
        batch = await create(http, await upload(http, *(line(str(index)) for index in range(5)), "{"))
        requests = [await mesh.outputs.next_request() for _ in range(2)]
        requests[1].answer("first")
        await until(http, batch, lambda each: each["request_counts"]["completed"] == 1)
    output = next((tmp_path / "batches" / "batches").glob("*.output"))
    half = b'{"id":"batch_req_0000000005_x","custom_id":"4","resp'  # a crash within a write
    output.write_bytes(output.read_bytes() + half)
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["second"]
        batch = await ended(http, batch)
        assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        answers = await results(http, batch["output_file_id"])
        texts = [each["response"]["body"]["choices"][0]["text"] for each in answers.values()]
        assert sorted(texts) == ["first"] + ["second"] * 4


async def test_a_cancelled_batch_is_not_resumed(socket_dir: Path, tmp_path: Path) -> None:
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path, drain_timeout=0.1) as mesh, mesh.http() as http:
        batch = await create(http, await upload(http, line("1"), line("2")))
        (await mesh.outputs.next_request()).answer("x")
        await until(http, batch, lambda each: each["request_counts"]["completed"] == 1)
    path = next((tmp_path / "batches").glob("*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "cancelling"}))
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path) as mesh, mesh.http() as http:
        batch = await ended(http, batch)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)
        assert len(await results(http, batch["output_file_id"])) == 1


async def test_what_is_too_late_expires(socket_dir: Path, tmp_path: Path) -> None:
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path, drain_timeout=0.1) as mesh, mesh.http() as http:
        batch = await create(http, await upload(http, *(line(str(index)) for index in range(3))))
        (await mesh.outputs.next_request()).answer("x")
        await until(http, batch, lambda each: each["request_counts"]["completed"] == 1)
    path = next((tmp_path / "batches").glob("*.json"))
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "expires_at": 1.0}))
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path) as mesh, mesh.http() as http:
        batch = await ended(http, batch)
        assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 3, "completed": 1, "failed": 2})
        errors = await results(http, batch["error_file_id"])
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


async def test_results_have_a_limit(socket_dir: Path, tmp_path: Path) -> None:
    options = {"batch_dir": tmp_path, "tenant_file_bytes": 3000, "max_file_bytes": 2000, "batch_concurrency": 1}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x" * 400]
        batch = await ended(http, await create(http, await upload(http, *(line(str(index)) for index in range(9)))))
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "results_too_large")
        assert 0 < batch["request_counts"]["completed"] < 9


async def test_a_directory_belongs_to_one_gateway(
    socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.services.gateway.files.disk._LOCK_SECONDS", 0.0)
    async with FakeMesh(socket_dir).gateway(batch_dir=tmp_path):
        disk = Disk(tmp_path)
        with pytest.raises(InvalidArgument, match="another gateway uses"):
            await disk.open()
        await disk.close()
    with pytest.raises(InvalidArgument, match="cannot be used"):
        await Disk(Path(os.devnull) / "x").open()


async def test_priorities_reach_engines_that_take_them(socket_dir: Path, tmp_path: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = types_pb2.ModelLimits(max_model_len=512, vocab_size=256, priorities=True)
    async with mesh.gateway(batch_dir=tmp_path), mesh.http() as http:
        batch = await create(http, await upload(http, line("1", priority=3)))
        request = await mesh.outputs.next_request()
        assert request.submit.priority == SHEDDABLE_PRIORITY
        request.answer("x")
        await ended(http, batch)
