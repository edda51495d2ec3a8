"""One gateway in front of two meshes: the model chooses the mesh."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.settings.mesh_spec import mesh_specs
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import coordinator_pb2, inference_pb2, output_processor_pb2
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.fixture
def other_dir() -> Iterator[Path]:
    """A directory for the sockets of the second mesh."""
    path = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def describe(other: FakeMesh, *names: str) -> Path:
    """Write the file ``--meshes`` for a second mesh."""
    address, path = other.address("mesh"), other.directory / "meshes.toml"
    path.write_text(
        f"[[mesh]]\nserved-model-name = {list(names)}\ntokenizers = '{address}'\n"
        f"output_processors = ['{address}']\ncoordinator = '{address}'\n"
    )
    return path


@asynccontextmanager
async def both(first_dir: Path, other_dir: Path) -> AsyncIterator[tuple[FakeMesh, FakeMesh]]:
    """Run a gateway that serves ``a`` (also called ``a2``) and ``b``, once both are connected."""
    first, other = FakeMesh(first_dir), FakeMesh(other_dir)
    first.outputs.auto, other.outputs.auto = ["from a"], ["from b"]
    settings = {"served_model_name": "a,a2", "meshes": describe(other, "b")}
    async with other.servers(), first.gateway(**settings), first.http() as http:
        await until(http, "ok")
        yield first, other


async def until(http: httpx.AsyncClient, status: str) -> None:
    """Wait until the gateway is in a state."""
    async with asyncio.timeout(SOON):
        while (await http.get("/health")).json()["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_model_of_a_form_chooses_the_mesh(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, _), mesh.http() as http:
        for name, status, message in (
            ("b", 400, "the model 'b' does not transcribe sounds"),
            ("a2", 400, "the model 'a' does not transcribe sounds"),
            ("c", 404, "model 'c' is not served"),
        ):
            form = {"file": ("a.wav", b"x" * 1000), "model": (None, name.encode())}  # the model stands behind the file
            response = await http.post("/v1/audio/transcriptions", files=form)
            assert (response.status_code, message in response.json()["error"]["message"]) == (status, True)


async def test_the_model_chooses_the_mesh(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        for path, body in BODIES.items():
            for name, served in (("a", "a"), ("a2", "a"), ("b", "b")):
                response = await http.post(path, json={**body, "model": name})
                assert (response.status_code, response.json()["model"]) == (200, served), (path, response.text)
                assert f"from {served}" in response.text
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("a", "a"), ("a2", "a"), ("b", "b")]
        assert (await http.get("/v1/models/b")).json()["id"] == "b"
        assert [model["name"] for model in (await http.get("/api/tags")).json()["models"]] == ["a", "a2", "b"]
        assert (await http.get("/v1/models/c")).status_code == 404
        calls = mesh.tokenizer.calls + mesh.second_tokenizer.calls, other.tokenizer.calls
        tokens = await http.post("/tokenize", json={"model": "b", "prompt": "hi"})
        assert tokens.json()["tokens"] == [104, 105]
        assert (mesh.tokenizer.calls + mesh.second_tokenizer.calls, other.tokenizer.calls) == (calls[0], calls[1] + 1)


async def test_bodies_without_a_known_model(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, _), mesh.http() as http:
        missing = await http.post("/v1/completions", json={"prompt": "hi"})
        assert missing.json()["error"]["message"] == "model is required: this gateway serves a, a2, b"
        unknown = await http.post("/v1/completions", json={"prompt": "hi", "model": "c"})
        assert unknown.status_code == 404
        assert "model 'c' is not served; GET /v1/models (" in unknown.text
        assert "lists the served models: a, a2, b" in unknown.text
        wrong = await http.post("/v1/completions", json={"prompt": "hi", "model": ["a"]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
        for content in (b"{", b"[1]", b'{"model":' + b"[" * 100_000):
            response = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, response.text
        large = {"prompt": "x" * 300_000, "model": "c"}
        assert (await http.post("/v1/completions", json=large)).status_code == 404


async def test_responses_are_found_whichever_model_wrote_them(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        response = (await http.post("/v1/responses", json={"input": "hi", "model": "b"})).json()
        assert (await http.get(f"/v1/responses/{response['id']}")).json()["model"] == "b"
        body = {"input": "and?", "model": "a", "previous_response_id": response["id"]}
        assert (await http.post("/v1/responses", json=body)).json()["model"] == "a"
        other.outputs.auto = None
        begun = (await http.post("/v1/responses", json={"input": "hi", "model": "b", "background": True})).json()
        request = await other.outputs.next_request()
        cancelled = (await http.post(f"/v1/responses/{begun['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await asyncio.wait_for(request.cancelled.wait(), SOON)


async def test_a_response_of_another_gateway_is_sought_in_every_mesh(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        other.outputs.auto = None
        begun = (await http.post("/v1/responses", json={"input": "hi", "model": "b", "background": True})).json()
        submit = (await other.outputs.next_request()).submit
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        other.outputs.recalled[submit.request_id] = output_processor_pb2.RecallResponse(
            recipe=submit.recipe, fingerprint=submit.fingerprint
        )
        assert (await http.get(f"/v1/responses/{begun['id']}")).json()["status"] == "in_progress"
        request, resume = await other.outputs.next_resume()
        assert resume.request_id == submit.request_id
        request.answer("from b")
        while (await http.get(f"/v1/responses/{begun['id']}")).json()["status"] != "completed":
            pass
        assert (await http.get("/v1/responses/resp_1")).status_code == 404
        assert (await http.delete(f"/v1/responses/{begun['id']}")).json()["deleted"]
        assert (await other.outputs.next_withdrawal()).request_id == submit.request_id


async def test_a_mesh_that_does_not_answer_hides_no_response_of_another(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        mesh.outputs.recall_fails = True
        path = f"/v1/responses/resp_{'0' * 40}"
        assert (await http.get(path)).status_code == 503, "it may have the response"
        other.outputs.auto = None
        body = {"input": "hi", "model": "b"}
        begun = asyncio.create_task(http.post("/v1/responses", json=body | {"background": True}))
        submit = (await other.outputs.next_request()).submit
        assert (await begun).status_code == 200
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        mesh.outputs.recall_fails = True
        other.outputs.recalled[submit.request_id] = output_processor_pb2.RecallResponse(
            recipe=submit.recipe, fingerprint=submit.fingerprint
        )
        assert (await http.get(f"/v1/responses/resp_{submit.request_id}")).json()["status"] == "in_progress"


async def test_grpc_goes_by_the_model_too(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, _), mesh.inference() as stub:
        for name in ("a2", "b"):
            request = inference_pb2.GenerateRequest(model=name, text="hi")
            answers = [response.text async for response in stub.Generate(request)]
            assert "".join(answers) == f"from {name[0]}"
        with pytest.raises(grpc.aio.AioRpcError, match="model is required"):
            await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(text="hi"))))
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.name for model in models] == ["a", "a2", "b"]

        async def turns() -> AsyncIterator[inference_pb2.GenerateRequest]:
            yield inference_pb2.GenerateRequest(model="b", text="hi")
            yield inference_pb2.GenerateRequest(model="a", text="hi")

        with pytest.raises(grpc.aio.AioRpcError, match="a session stays with the model of its first turn"):
            async for _ in stub.GenerateSession(turns()):
                pass
        await stub.Cancel(inference_pb2.InferenceCancelRequest(request_id="0" * 40))


async def test_kserve_goes_by_the_model_too(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, _), open_channel(mesh.grpc_address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, served in (("a2", "a"), ("b", "b")):
            request = grpc_service_pb2.ModelInferRequest(model_name=name)
            tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(b"hi")
            response = await stub.ModelInfer(request)
            assert response.model_name == served
            assert response.outputs[0].contents.bytes_contents == [f"from {served}".encode()]
            assert (await stub.ModelReady(grpc_service_pb2.ModelReadyRequest(name=name))).ready
        assert not (await stub.ModelReady(grpc_service_pb2.ModelReadyRequest(name="c"))).ready
        assert (await stub.ServerReady(grpc_service_pb2.ServerReadyRequest())).ready


async def test_a_mesh_that_is_away_leaves_the_others_served(socket_dir: Path, other_dir: Path) -> None:
    first, other = FakeMesh(socket_dir), FakeMesh(other_dir)
    first.outputs.auto, other.outputs.auto = ["from a"], ["from b"]
    settings = {"served_model_name": "a", "meshes": describe(other, "b")}
    async with first.gateway(**settings) as mesh, mesh.http() as http:
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        states = health.json()["models"]
        assert states["a"]["status"] == "ok"
        assert (states["b"]["status"], states["b"]["missing"]) == (
            "unavailable",
            ["tokenizer", "output_processor", "engine"],
        )
        away = await http.post("/v1/completions", json={"prompt": "hi", "model": "b"})
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert 'tokenloom_part_missing{model_name="b",part="engine"} 1.0' in (await http.get("/metrics")).text
        async with other.servers():
            await until(http, "ok")
            assert (await http.post("/v1/completions", json={"prompt": "hi", "model": "b"})).status_code == 200
            await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_DEAD)
            await until(http, "degraded")
            assert (await http.post("/v1/completions", json={"prompt": "hi", "model": "b"})).status_code == 200
            await other.coordinator.set_state(coordinator_pb2.ENGINE_STATE_DEAD)
            await until(http, "unavailable")
            assert (await http.get("/health")).status_code == 503


async def test_what_waits_is_counted_for_the_model_that_has_no_engine(socket_dir: Path, other_dir: Path) -> None:
    """By this number the engines of one model are started, and no others."""
    first, other = FakeMesh(socket_dir), FakeMesh(other_dir)
    first.outputs.auto = ["from a"]
    settings = {"served_model_name": "a", "meshes": describe(other, "b"), "ready_without_engines": True}
    async with other.servers(), first.gateway(**settings) as mesh, mesh.http() as http:
        await until(http, "ok")
        await other.coordinator.set_state(coordinator_pb2.ENGINE_STATE_DEAD)
        await until(http, "degraded")
        assert (await http.get("/health")).status_code == 200
        waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "model": "b"}))
        page, held = "", "tokenloom_gateway_held_requests"
        async with asyncio.timeout(SOON):
            while f'{held}{{model_name="b"}} 1.0' not in page:
                page = (await http.get("/metrics")).text
                await asyncio.sleep(0.01)
        assert f'{held}{{model_name="a"}} 0.0' in page
        assert 'tokenloom_part_missing{model_name="b",part="engine"} 0.0' in page
        assert (await http.post("/v1/completions", json={"prompt": "hi", "model": "a"})).status_code == 200
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_metrics_name_the_model(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, _), mesh.http() as http:
        for name in ("a", "b", "b"):
            await http.post("/v1/completions", json={"prompt": "hi", "model": name})
        text = (await http.get("/metrics")).text
        assert 'vllm:prompt_tokens_total{model_name="a"} 2.0' in text
        assert 'vllm:prompt_tokens_total{model_name="b"} 4.0' in text
        samples = [
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        assert len(samples) == len(set(samples)), "a sample appears twice"


async def test_a_drain_waits_for_the_requests_of_every_mesh(socket_dir: Path, other_dir: Path) -> None:
    """The meshes share the count of live outputs: the end of one mesh's last request must not wait for another's."""
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        mesh.outputs.auto = other.outputs.auto = None
        calls = [
            asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "model": name})) for name in "ab"
        ]
        first, second = await mesh.outputs.next_request(), await other.outputs.next_request()
        assert mesh.service is not None
        draining = asyncio.create_task(mesh.service.drain())
        first.answer("x")
        await calls[0]
        second.answer("y")
        await calls[1]
        await asyncio.wait_for(draining, SOON)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must hold tables \[\[mesh\]\]"),
        ("x = 1\n[[mesh]]\n", r"must hold tables \[\[mesh\]\]"),
        ("[[mesh]]\n", "mesh 1: Object missing required field `served_model_name`"),
        (
            "[[mesh]]\nserved_model_name='a'\ntokenizers='x:1'\noutput_processors='x:1'\ncoordinator='x:1'",
            "given twice",
        ),
        ("[[mesh]]\nserved_model_name='b'\ntokenizers='x'\noutput_processors='x:1'\ncoordinator='x:1'", "mesh 1: "),
        ("[[mesh]]\nserved_model_name=''\ntokenizers='x:1'\noutput_processors='x:1'\ncoordinator='x:1'", "one name"),
        ("[[mesh]\n", "cannot be parsed"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "meshes.toml"
    path.write_text(text)
    settings = GatewaySettings.of(
        served_model_name="a", tokenizers="x:1", output_processors="x:1", coordinator="x:1", meshes=path
    )
    with pytest.raises(InvalidArgument, match=f"--meshes: .*{message}"):
        mesh_specs(settings)


def test_several_meshes_need_names() -> None:
    with pytest.raises(ValueError, match="--meshes needs --served-model-name"):
        GatewaySettings.of(tokenizers="x:1", output_processors="x:1", coordinator="x:1", meshes="m.toml")


async def test_the_page_shows_the_mesh_of_a_model(socket_dir: Path, other_dir: Path) -> None:
    async with both(socket_dir, other_dir) as (mesh, other), mesh.http() as http:
        await other.coordinator.set_engines("other-engine")
        async with asyncio.timeout(SOON):
            while "other-engine" not in (shown := await http.get("/mesh?model=b")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first = (await http.get("/mesh")).json()
        assert (first["model"], first["models"], shown.json()["model"]) == ("a", ["a", "b"], "b")
        assert "other-engine" not in str(first)
        for name in ("a2", "b"):
            assert (await http.get("/traffic", params={"model": name})).json()["running"] == []
        assert (await http.get("/mesh?model=c")).status_code == 404
