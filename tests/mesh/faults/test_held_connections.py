"""A gateway is killed while it answers clients that notice nothing: another one goes on, on the same connections."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.mesh.faults.held_clients import (
    _MORE,
    TOKENS,
    Read,
    openai_client,
    read_background,
    read_chat,
    read_curl,
    read_large_response,
    read_messages,
    read_response,
    read_response_tools,
    read_samples,
    read_stub,
    read_tools,
    read_whole,
    shown,
)
from tests.mesh.faults.test_killed_gateways import SLOW, STREAMS
from tests.mesh.harness import MODEL, SOON, Mesh
from tests.plain_text import PLAIN_TEXT
from tests.services.relay.running_relay import count, running_relay
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.supervisor.certificates import make_certificates


class Victim:
    """A gateway in a process of its own, with a holder."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)

    def holders(self) -> list[psutil.Process]:
        """The process that keeps the holder, and the holder."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=SOON, verify=PLAIN_TEXT)


@asynccontextmanager
async def victim(mesh: Mesh, directory: Path) -> AsyncIterator[Victim]:
    """Start a gateway of a mesh."""
    settings = mesh.gateway.settings
    assert isinstance(settings, GatewaySettings)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port, number = held.getsockname()[1], held.fileno()
        flags = {
            "instance-id": "gateway-1",
            "listen": f"unix:{directory}/victim",
            "http-listen": f"127.0.0.1:{port}",
            "http-listen-fd": str(number),
            "metrics-listen": "",
            "tokenizers": ",".join(settings.tokenizers),
            "output-processors": ",".join(settings.output_processors),
            "coordinator": settings.coordinator,
            "hold-connections": f"{directory}/held",
            "journal-copies": str(settings.journal_copies),
        }
        command = [sys.executable, "-m", "tokenloom.services.gateway"]
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(*command, pass_fds=(number,))
    gateway = Victim(process, port)
    try:
        async with gateway.http() as http, asyncio.timeout(SOON):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield gateway
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not noticed yet
                process.kill()
        await process.wait()


@asynccontextmanager
async def held_mesh(
    directory: Path, *, takes: bool = True, journal_copies: int = 1, **options: Any
) -> AsyncIterator[Mesh]:
    """A mesh. ``takes``: whether its gateway takes the connections of others."""
    meeting = directory / "held"
    meeting.mkdir()
    options = {"output_processors": 2, "engine": SLOW, **options}
    gateway: dict[str, Any] = {"hold_connections": str(meeting)} if takes else {}
    gateway["journal_copies"] = journal_copies
    async with Mesh(directory, gateway=gateway, **options).running() as mesh:
        yield mesh


async def taken(mesh: Mesh | Victim, state: str) -> int:
    """How many connections the mesh's gateway, or this one, has taken."""
    async with mesh.http() as http:
        metrics = (await http.get("/metrics")).text
    name = f'tokenloom_gateway_taken_responses_total{{state="{state}"}} '
    return sum(int(float(line.removeprefix(name))) for line in metrics.splitlines() if line.startswith(name))


READERS: dict[str, Read] = {
    "chat": read_chat,
    "samples": read_samples,
    "tools": read_tools,
    "messages": read_messages,
    "response": read_response,
    "response with tools": read_response_tools,
    "large response": read_large_response,
    "background": read_background,
    "curl": read_curl,
}


async def test_streams_go_on_when_their_gateway_and_output_processor_are_killed(socket_dir: Path) -> None:
    """The clients are those of others, and notice nothing but a pause: another gateway continues from the copies."""
    async with held_mesh(socket_dir, journal_copies=2) as mesh:
        lost, other = mesh.output_processors
        # First: a grammar that is not compiled yet delays its stream until the others have ended.
        references = await asyncio.gather(*(read(mesh.url, lambda: None) for read in READERS.values()))
        killing = asyncio.Event()
        async with victim(mesh, socket_dir) as gateway:
            begun = dict.fromkeys(READERS, False)

            def begin(name: str) -> None:
                begun[name] = True
                if all(begun.values()):
                    gateway.kill()
                    killing.set()

            async def kill() -> None:
                await killing.wait()
                await lost.kill()

            reads = [read(gateway.url, partial(begin, name)) for name, read in READERS.items()]
            async with asyncio.timeout(3 * SOON):
                *answers, _ = await asyncio.gather(*reads, kill())
        assert dict(zip(READERS, answers, strict=True)) == dict(zip(READERS, references, strict=True))
        assert other.host is not None
        name = "tokenloom_output_processor_journal_copies_used_total"
        assert other.host.metrics.get_sample_value(name, {"outcome": "resumed"}), "some were at the one that is lost"
        await mesh.until_idle()
        await lost.start()


async def test_streams_go_on_when_their_gateway_is_killed(socket_dir: Path) -> None:
    """All at once: clients of OpenAI and Anthropic, and curl."""
    async with held_mesh(socket_dir) as mesh:
        # First: a grammar that is not compiled yet delays its stream until the others have ended.
        references = await asyncio.gather(*(read(mesh.url, lambda: None) for read in READERS.values()))
        async with victim(mesh, socket_dir) as gateway:
            begun = dict.fromkeys(READERS, False)

            def begin(name: str) -> None:
                begun[name] = True
                if all(begun.values()):
                    gateway.kill()

            reads = [read(gateway.url, partial(begin, name)) for name, read in READERS.items()]
            async with asyncio.timeout(SOON):
                answers = await asyncio.gather(*reads)
        assert dict(zip(READERS, answers, strict=True)) == dict(zip(READERS, references, strict=True))
        assert await taken(mesh, "begun") == len(READERS)
        await mesh.until_idle()


async def test_a_whole_answer_is_made_by_the_next_gateway(socket_dir: Path) -> None:
    async with held_mesh(socket_dir) as mesh:
        async with victim(mesh, socket_dir) as gateway:
            killed = asyncio.create_task(_kill_when_running(mesh, gateway))
            answer = await read_whole(gateway.url, lambda: None)
            await killed
        assert answer == await read_whole(mesh.url, lambda: None)
        assert await taken(mesh, "not_begun") == 1
        await mesh.until_idle()


async def test_calls_without_streams_are_made_by_the_next_gateway(socket_dir: Path) -> None:
    """The gateway is killed in the midst of a response of the Responses API, of embeddings and of half a request."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "Wake me.", "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        "/v1/embeddings": {"input": ["Once upon"] * 1500},  # more than is stored of a request as it arrives
        "/rerank": {"query": "Once", "documents": ["upon", "a time"]},
    }
    async with held_mesh(socket_dir, engine={**SLOW, "hash_step_seconds": 0.05}) as mesh:
        async with victim(mesh, socket_dir) as gateway, gateway.http() as http:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: appl")
            calls = [asyncio.create_task(http.post(path, json=body)) for path, body in bodies.items()]
            await _kill_when_running(mesh, gateway)
            body = json.dumps({"prompt": "Once upon a time"}).encode()
            writer.write(b"ication/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            async with asyncio.timeout(SOON):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                answers = [await call for call in calls]
            writer.close()
        assert [answer.status_code for answer in answers] == [200, 200, 200], [answer.text for answer in answers]
        async with mesh.http() as http:
            texts = [_outputs((await http.post(path, json=body)).json()) for path, body in bodies.items()]
        assert [_outputs(answer.json()) for answer in answers] == texts
        assert await taken(mesh, "not_begun") >= 3
        await mesh.until_idle()


def _outputs(answer: Any) -> Any:
    """What a call has computed."""
    if "output" in answer:
        return [part["text"] for item in answer["output"] for part in item["content"]]
    if "results" in answer:
        return [(each["index"], each["relevance_score"]) for each in answer["results"]]
    return [each["embedding"] for each in answer["data"]]


async def test_a_connection_without_a_request_goes_on(socket_dir: Path) -> None:
    """As clients keep them between two requests: nothing is sent anew."""
    async with held_mesh(socket_dir) as mesh, victim(mesh, socket_dir) as gateway, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        unused, unread = await asyncio.open_connection("127.0.0.1", gateway.port)
        await _ask_on(reader, writer)
        gateway.kill()
        while await taken(mesh, "idle") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await _ask_on(reader, writer)
        await _ask_on(unused, unread)
        writer.close()
        unread.close()


async def _ask_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert MODEL.encode() in await reader.readexactly(length)


async def _kill_when_running(mesh: Mesh, gateway: Victim) -> None:
    await mesh.until_running()
    gateway.kill()


async def test_a_stream_goes_on_after_each_of_several_kills(socket_dir: Path) -> None:
    """Each gateway has taken it from the one before, and holds it for the next."""
    async with held_mesh(socket_dir, takes=False) as mesh, contextlib.AsyncExitStack() as started:
        first = await started.enter_async_context(victim(mesh, socket_dir))
        gateways = [first]
        count = 0

        async def restart() -> None:
            gateways[-1].kill()
            gateways.append(await started.enter_async_context(victim(mesh, socket_dir)))
            # A connection is lost with the gateway that is being given it.
            while await taken(gateways[-1], "begun") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        kills: list[asyncio.Task[None]] = []
        texts, numbered = [], asyncio.create_task(read_response(first.url, lambda: None, **_LONG))
        await mesh.until_running()
        async with openai_client(first.url) as client, asyncio.timeout(2 * SOON):
            stream = await client.completions.create(
                model=MODEL, prompt="Once", max_tokens=400, seed=8, stream=True, extra_body={"ignore_eos": True}
            )
            async for event in stream:
                texts += [choice.text for choice in event.choices]
                count += 1
                if count >= 5 and len(kills) < 2 and all(kill.done() for kill in kills):
                    kills.append(asyncio.create_task(restart()))
        await asyncio.gather(*kills)
        async with openai_client(mesh.url) as client, asyncio.timeout(2 * SOON):
            completion = client.completions.create(
                model=MODEL, prompt="Once", max_tokens=400, seed=8, extra_body={"ignore_eos": True}
            )
            whole, reference = await asyncio.gather(completion, read_response(mesh.url, lambda: None, **_LONG))
        assert "".join(texts) == whole.choices[0].text
        assert await numbered == reference
        assert len(gateways) == 3


_LONG: dict[str, Any] = {"extra_body": {"seed": 9, "min_tokens": 400}, "max_output_tokens": 400}


async def test_a_response_goes_on_that_continues_one_of_the_killed_gateway(socket_dir: Path) -> None:
    """No other gateway has that one; the response after it is continued where this one ended."""
    async with held_mesh(socket_dir) as mesh:
        async with victim(mesh, socket_dir) as gateway, asyncio.timeout(2 * SOON):
            first = await _first_response(gateway.url)
            answer = await read_response(gateway.url, gateway.kill, previous_response_id=first)
        assert await taken(mesh, "begun") == 1
        again = await _first_response(mesh.url)
        assert again != first
        assert answer == await read_response(mesh.url, lambda: None, previous_response_id=again)
        await mesh.until_idle()


async def _first_response(url: str) -> str:
    async with openai_client(url) as client:
        response = await client.responses.create(
            model=MODEL, input="Sleep well.", max_output_tokens=4, extra_body={"seed": 2}
        )
    return response.id


async def test_events_that_are_read_of_a_response_in_the_background_go_on(socket_dir: Path) -> None:
    """By a call of its own, which begins behind an event that the client has."""
    async with held_mesh(socket_dir) as mesh:
        async with victim(mesh, socket_dir) as gateway, openai_client(gateway.url) as client:
            asked: dict[str, Any] = {"max_output_tokens": TOKENS, "background": True, "stream": True}
            events = []
            stream = await client.responses.create(model=MODEL, input="Wake me.", extra_body=_MORE, **asked)
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    break
            await stream.close()
            name = events[0].response.id
            async with asyncio.timeout(SOON):
                async for event in await client.responses.retrieve(name, stream=True, starting_after=3):
                    events.append(event)
                    if len(events) == 8:
                        gateway.kill()
        assert shown(events) == await read_background(mesh.url, lambda: None)
        assert await taken(mesh, "begun") == 1


async def test_tls_and_grpc_of_unmodified_clients_outlive_a_gateway_behind_a_relay(
    socket_dir: Path, tmp_path: Path
) -> None:
    """A stub as it is generated gets the rest from another gateway, and OpenAI's client on its own connection."""
    make_certificates(tmp_path, days=30)
    async with held_mesh(socket_dir) as mesh:
        address = f"unix:{socket_dir}/relay"
        async with victim(mesh, socket_dir) as gateway, contextlib.AsyncExitStack() as opened:
            held = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"https://127.0.0.1:{held.getsockname()[1]}"
            gateways = (f"unix:{socket_dir}/victim", mesh.address("gateway-0"))
            of_grpc = await opened.enter_async_context(running_relay(grpc_listen=address, grpc_gateways=gateways))
            of_https = await opened.enter_async_context(
                running_relay(
                    https_listen=url.removeprefix("https://"),
                    https_listen_fd=held.detach(),
                    http_gateways=(f"127.0.0.1:{gateway.port}",),
                    public_tls_cert=tmp_path / "gateway.crt",
                    public_tls_key=tmp_path / "gateway.key",
                )
            )
            begun = dict.fromkeys(("grpc", "https"), False)

            def begin(name: str) -> None:
                if not begun[name]:
                    begun[name] = True
                    if all(begun.values()):
                        gateway.kill()

            trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
            trusted.check_hostname = False
            http = await opened.enter_async_context(httpx.AsyncClient(verify=trusted, timeout=SOON))
            async with asyncio.timeout(SOON):
                answers = await asyncio.gather(
                    read_stub(address, partial(begin, "grpc")), read_chat(url, partial(begin, "https"), http)
                )
            assert count(of_grpc, "continued_total") == 1
            assert (count(of_https, "connections_total"), count(of_https, "broken_connections_total")) == (1, 0)
        direct = read_stub(mesh.address("gateway-0"), lambda: None), read_chat(mesh.url, lambda: None)
        assert answers == await asyncio.gather(*direct)
        assert await taken(mesh, "begun") == 1
        await mesh.until_idle()


async def test_a_client_that_leaves_meanwhile_ends_its_request(socket_dir: Path) -> None:
    """Otherwise it would run for minutes: the output processor keeps it for whoever resumes it."""
    slow = {"hash_step_seconds": 0.5, "max_model_len": 512}
    async with held_mesh(socket_dir, engine=slow) as mesh, victim(mesh, socket_dir) as gateway:
        path, fields = STREAMS["text"]
        body = json.dumps({"model": MODEL, "stream": True, **fields, "max_tokens": 400}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode())
        writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert await reader.readuntil(b"\n\n")
        gateway.kill()
        writer.transport.abort()
        await mesh.until_idle()


async def test_holders_end_with_their_gateway_and_nothing_stays(socket_dir: Path) -> None:
    async with held_mesh(socket_dir) as mesh:
        answer, counts = await read_chat(mesh.url, lambda: None), []
        for kills in (1, 2):
            async with victim(mesh, socket_dir) as gateway:
                keeper, holder = gateway.holders()
                assert (keeper.name(), holder.name(), holder.ppid()) == ("holder", "holder", keeper.pid)
                holder.kill()
                async with asyncio.timeout(SOON):
                    while len(holders := gateway.holders()) != 2 or holders[1] == holder:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert answer == await read_chat(gateway.url, gateway.kill)  # the second holder gives it away
            assert await taken(mesh, "begun") == kills
            await asyncio.to_thread(psutil.wait_procs, holders, SOON)
            assert not any(process.is_running() for process in holders)
            await mesh.until_idle()
            counts.append(psutil.Process().num_fds())
        assert counts[1] <= counts[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"http_listen": "unix:/tmp/of-no-port"}, "needs an --http-listen of TCP"),
        ({"public_tls_cert": "a.pem", "public_tls_key": "a.key"}, "cannot be combined with --public-tls-cert"),
    ],
)
def test_what_cannot_be_held_is_refused_at_the_start(flags: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        GatewaySettings.of(
            tokenizers=["a:1"], output_processors=["b:1"], coordinator="c:1", hold_connections=tmp_path, **flags
        )
