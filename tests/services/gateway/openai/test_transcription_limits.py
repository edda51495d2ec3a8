"""What bounds transcriptions: limits of tenants and of the gateway, its disk, and time."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.openai.ear import Ear, listening, piece_of, tokens
from tokenloom.request import errors
from tokenloom.services.gateway.files import sound_uploads
from tokenloom.services.gateway.http import request_body

ROUTE = "/v1/audio/transcriptions"
BOUNDARY = b"--b\r\n"
HEAD = BOUNDARY + b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nsound 800 '
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def hold(ear: Ear) -> asyncio.Event:
    """Let no piece be answered, and return what is set when the first one has arrived."""
    answer, held = ear.answer, asyncio.Event()

    def keep(request: Any) -> None:
        if request.submit.sampling_params.max_tokens == 1:
            answer(request)
        else:
            held.set()

    ear.answer = keep  # type: ignore[method-assign]
    return held


async def busy(ear: Ear) -> "asyncio.Task[Any]":
    """Begin a transcription that does not end."""
    held = hold(ear)
    call = asyncio.create_task(ear.post(language="de"))
    await held.wait()
    return call


async def test_limits_of_a_tenant(socket_dir: Path) -> None:
    async with listening(socket_dir, tenant_live_outputs=1) as ear:
        call = await busy(ear)
        refused = await ear.post()
        assert (refused.status_code, "live_outputs" in refused.text) == (429, True)
        call.cancel()
    async with listening(socket_dir, tenant_tokens_per_second=0.001, tenant_token_burst=450) as ear:
        ear.heard = {0: tokens(" a")}
        assert (await ear.post(language="de")).status_code == 200
        refused = await ear.post(language="de")
        assert (refused.status_code, "tokens_per_second" in refused.text) == (429, True)


async def test_a_full_gateway(socket_dir: Path) -> None:
    async with listening(socket_dir, max_live_requests=1) as ear:
        call = await busy(ear)
        assert (await ear.post()).status_code == 503
        call.cancel()


async def test_a_later_piece_waits_until_there_is_room(socket_dir: Path) -> None:
    async with listening(socket_dir, max_live_requests=1) as ear:
        ear.heard = {0: tokens("| one||", 0, 20, 20), 400: tokens("| two|", 0, 20)}
        answer, other = ear.answer, asyncio.Event()
        seats = ear.mesh.service

        def fill(request: Any) -> None:
            """Take the only seat between two pieces."""
            assert seats is not None
            assert seats._started is not None
            admission = seats._started[0].first.generator._admission
            if not other.is_set():
                other.set()
                loop = asyncio.get_running_loop()
                taken = admission._shares.outputs.take_anyway(1)
                loop.call_later(0.2, taken.release)
            answer(request)

        ear.answer = fill  # type: ignore[method-assign]
        response = await ear.post(1400, language="de")
        assert response.json()["text"] == "one two"


async def test_a_later_piece_that_full_engines_refuse_is_sent_again(socket_dir: Path) -> None:
    async with listening(socket_dir) as ear:
        ear.heard = {0: tokens("| one||", 0, 20, 20), 400: tokens("| two|", 0, 20)}
        answer, refused = ear.answer, list[Any]()

        def refuse(request: Any) -> None:
            if piece_of(request)[0] == 400 and not refused:
                refused.append(request)
                request.fail(errors.ResourceExhausted("the engines are full", retry_after=0.01))
            else:
                answer(request)

        ear.answer = refuse  # type: ignore[method-assign]
        response = await ear.post(1400, language="de")
        assert (response.status_code, response.json().get("text")) == (200, "one two")
        assert refused


async def test_the_first_piece_that_full_engines_refuse_is_refused(socket_dir: Path) -> None:
    async with listening(socket_dir) as ear:
        ear.answer = lambda request: request.fail(errors.ResourceExhausted("full"))  # type: ignore[method-assign]
        assert (await ear.post(1400, language="de")).status_code == 503


async def test_a_piece_that_takes_too_long(socket_dir: Path) -> None:
    async with listening(socket_dir, request_timeout=0.3) as ear:
        hold(ear)
        assert (await ear.post(language="de")).status_code == 504


async def test_an_upload_that_stops(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)

    async with listening(socket_dir) as ear:
        host, _, port = ear.mesh.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['Content-Type']}\r\n"
        writer.write(head.encode() + b"Content-Length: 100000\r\n\r\n" + HEAD)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_an_upload_that_hardly_goes_on(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_uploads, "BODY_SECONDS", 0.05)

    async with listening(socket_dir) as ear:
        host, _, port = ear.mesh.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['Content-Type']}\r\n"
        writer.write(head.encode() + b"Content-Length: 10000\r\n\r\n" + HEAD)
        reading = asyncio.create_task(reader.readline())
        for _ in range(5000):
            writer.write(b"x")
            if (await asyncio.wait({reading}, timeout=0.01))[0]:
                break
        assert (await reading).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_tokens_are_charged_once(socket_dir: Path) -> None:
    async with listening(socket_dir) as ear:
        ear.heard = {0: tokens("| one||", 0, 20, 20), 400: tokens("| two|", 0, 20)}
        await ear.post(1400, language="de")
        num_prompt = sum(len(each.submit.prompt.token_ids) for each in ear.requests)
        num_output = sum(map(len, ear.heard.values()))
        metrics = (await ear.http.get("/metrics")).text
        assert f'tokenloom_tenant_tokens_total{{tenant=""}} {float(num_prompt + num_output)}' in metrics


async def test_disk_of_sounds_in_work(socket_dir: Path) -> None:
    limits = {"max_audio_bytes": 1 << 20, "max_audio_bytes_in_flight": 3 << 20}
    async with listening(socket_dir, **limits) as ear:
        held = hold(ear)
        large = {"file": ("a.wav", b"sound 800 " + b"x" * ((1 << 20) - 10))}
        calls = []
        for _ in range(2):
            calls.append(asyncio.create_task(ear.http.post(ROUTE, files=large, data={"language": "de"})))
            await held.wait()
            held.clear()
        refused = await ear.http.post(ROUTE, files=large)
        assert (refused.status_code, "bytes of sounds" in refused.text) == (503, True)
        metrics = (await ear.http.get("/metrics")).text
        (line,) = [each for each in metrics.splitlines() if each.startswith("tokenloom_tenant_sound_bytes{")]
        assert float(line.split()[-1]) > 2 << 20
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for each in ear.requests:
            await asyncio.wait_for(each.cancelled.wait(), 30)
        assert (await ear.http.post(ROUTE, files=large, data={"language": "xx"})).status_code == 400


async def test_an_upload_without_a_length(socket_dir: Path) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(count):
            yield b"x" * 100_000
        yield b"\r\n--b--\r\n"

    async with listening(socket_dir, max_audio_bytes=2 << 20, max_audio_bytes_in_flight=4 << 20) as ear:
        ear.heard = {0: tokens(" a")}
        assert (await ear.http.post(ROUTE, content=pieces(15), headers=FORM)).status_code == 200
        assert (await ear.http.post(ROUTE, content=pieces(30), headers=FORM)).status_code == 413


async def test_a_disk_that_is_full(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(spooled: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sound_uploads.SpooledFile, "write", full)
    async with listening(socket_dir) as ear:
        response = await ear.post()
        assert (response.status_code, "No space left on device; retry later" in response.text) == (503, True)


async def test_a_disk_that_does_not_give_a_sound_back(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(spooled: object, start: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sound_uploads.SpooledFile, "read", damaged)
    async with listening(socket_dir) as ear:
        response = await ear.post()
        assert (response.status_code, "cannot read the sound" in response.text) == (500, True)


async def test_a_file_on_a_disk_that_hangs_is_closed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()
    spooled = sound_uploads.SpooledFile()
    file = spooled._file

    class Hanging:
        close = file.close
        seek = file.seek

        def write(self, data: memoryview) -> int:
            began.set()
            assert goes_on.wait(30)
            return file.write(data) or 0

    monkeypatch.setattr(spooled, "_file", Hanging())
    writing = asyncio.create_task(asyncio.to_thread(spooled.write, b"sound"))
    await asyncio.to_thread(began.wait)
    spooled.close()
    assert not file.closed
    goes_on.set()
    await writing
    assert file.closed


async def test_a_sound_has_no_name_on_disk(socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with listening(socket_dir) as ear:
        call = await busy(ear)
        assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
        call.cancel()
