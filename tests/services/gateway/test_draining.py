"""A gateway that drains with ``--drain migrate`` sends a resuming HTTP client to another gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.plain_text import PLAIN_TEXT
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.host.service import running

PATH = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def second_gateway(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    address = mesh.address("mesh")
    settings = GatewaySettings.of(
        listen=mesh.address("second-grpc"),
        http_listen="127.0.0.1:0",
        metrics_listen="",
        tokenizers=(address,),
        output_processors=(address,),
        coordinator=address,
        drain_timeout=1.0,
    )
    service = GatewayService(settings)
    async with running(service, settings):
        url = f"http://{service.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=SOON, verify=PLAIN_TEXT) as http:
            yield http


def text_of(events: list[str]) -> str:
    pieces = [json.loads(event.partition("data: ")[2]) for event in events if not event.endswith("[DONE]")]
    return "".join(choice["text"] for piece in pieces for choice in piece["choices"])


async def read(http: httpx.AsyncClient, headers: dict[str, str], begun: asyncio.Event) -> list[str]:
    """Read the events of a stream. ``begun``: set with the first of them."""
    text = ""
    async with http.stream("POST", PATH, content=BODY, headers=headers) as response:
        async for piece in response.aiter_text():
            text += piece
            begun.set()
    return [event for event in text.split("\n\n") if event]


@pytest.mark.parametrize("resumes", [True, False])
async def test_streams_of_a_gateway_that_migrates(socket_dir: Path, resumes: bool) -> None:
    """A client that resumes is sent away at once; a plain client reads its stream to the end."""
    async with FakeMesh(socket_dir).gateway(drain="migrate", drain_timeout=SOON) as mesh, second_gateway(mesh) as other:
        async with mesh.http() as http:
            headers = JSON | ({"Last-Event-ID": "0"} if resumes else {})
            begun = asyncio.Event()
            reading = asyncio.create_task(read(http, headers, begun))
            request = await mesh.outputs.next_request()
            request.send("one", [1])
            async with asyncio.timeout(SOON):
                await begun.wait()
            assert mesh.service is not None
            draining = asyncio.create_task(mesh.service.drain())
            if not resumes:
                request.answer(" two")
            events = await reading
            await draining
        if not resumes:
            assert (text_of(events), events[-1]) == ("one two", "data: [DONE]")
            return
        *events, last = events
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "gateway_leaving"
        assert not request.cancelled.is_set()
        last_id = events[-1].split("\n")[0].removeprefix("id: ")
        resuming = asyncio.create_task(other.post(PATH, content=BODY, headers=JSON | {"Last-Event-ID": last_id}))
        again, resume = await mesh.outputs.next_resume()
        assert resume.request_id == request.submit.request_id
        again.answer("one", " two")
        rest = [event for event in (await resuming).text.split("\n\n") if event]
        assert (text_of(events + rest), rest[-1]) == ("one two", "data: [DONE]")
