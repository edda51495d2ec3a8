"""``/v1/files``: what is stored, for whom, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh
from tokenloom.services.gateway.files import file_store
from tokenloom.services.gateway.files.multipart import MAX_FIELD_BYTES, MAX_HEAD_BYTES, MAX_PARTS

CONTENT = b'{"custom_id":"1"}\n' * 20_000
KEYS = {"Authorization": "Bearer a"}


@pytest.fixture
async def http(socket_dir: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the key ``a`` of a gateway that stores files."""
    async with FakeMesh(socket_dir).gateway(**limits(tmp_path)) as mesh, mesh.http(headers=KEYS) as client:
        yield client


def limits(directory: Path) -> dict[str, Any]:
    return {
        "api_key": ("a", "b"),
        "batch_dir": directory / "batches",
        "max_file_bytes": 400_000,
        "tenant_file_bytes": 800_000,
        "tenant_files": 3,
    }


def form(content: bytes = CONTENT, **fields: str) -> dict[str, Any]:
    return {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch", **fields}}


async def test_a_file_from_upload_to_deletion(http: httpx.AsyncClient, tmp_path: Path) -> None:
    file = (await http.post("/v1/files", **form())).json()
    assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == (
        *("file", len(CONTENT), "in.jsonl", "batch"),
    )
    path = f"/v1/files/{file['id']}"
    assert (await http.get(path)).json() == file
    content = await http.get(path + "/content")
    assert (content.content, content.headers["content-length"]) == (CONTENT, str(len(CONTENT)))
    assert (await http.head(path + "/content")).content == b""
    assert (await http.delete(path)).json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await http.get(path)).status_code == 404
    assert not list((tmp_path / "batches" / "files").iterdir())


async def test_a_key_sees_its_own_files_only(http: httpx.AsyncClient) -> None:
    file = (await http.post("/v1/files", **form(b"x"))).json()
    other = {"Authorization": "Bearer b"}
    assert (await http.get("/v1/files", headers=other)).json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        response = await http.request(method, f"/v1/files/{file['id']}{path}", headers=other)
        assert response.status_code == 404
    assert (await http.get("/v1/files", headers={"Authorization": ""})).status_code == 401


async def test_a_file_that_is_deleted_while_it_is_opened_is_not_found(http: httpx.AsyncClient, tmp_path: Path) -> None:
    file = (await http.post("/v1/files", **form(b"x"))).json()
    (tmp_path / "batches" / "files" / file["id"]).unlink()
    response = await http.get(f"/v1/files/{file['id']}/content")
    assert (response.status_code, file["id"] in response.text) == (404, True)


async def test_a_full_disk_is_an_error_that_may_be_retried(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file_store, "write_atomically", full)
        response = await http.post("/v1/files", **form())
    assert (response.status_code, "No space left on device; retry later" in response.text) == (503, True)
    assert response.headers["retry-after"] == "10"
    assert (await http.post("/v1/files", **form())).status_code == 200


async def test_lists_come_in_pages(http: httpx.AsyncClient) -> None:
    ids = [(await http.post("/v1/files", **form(b"x"))).json()["id"] for _ in range(3)]
    page = (await http.get("/v1/files?limit=2")).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    page = (await http.get(f"/v1/files?after={page['last_id']}&purpose=batch")).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[0]], False)
    assert [each["id"] for each in (await http.get("/v1/files?order=asc")).json()["data"]] == ids
    assert (await http.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for query in ("limit=0", "limit=x", "order=up", "after=nothing", "colour=red"):
        assert (await http.get(f"/v1/files?{query}")).status_code == 400, query


async def test_limits_of_a_tenant(http: httpx.AsyncClient, tmp_path: Path) -> None:
    large = await http.post("/v1/files", **form(b"x" * 500_000))
    assert large.status_code == 413, large.text

    async def endless() -> AsyncIterator[bytes]:  # its length is not announced
        head, _ = bytes_of(b"")
        yield head
        for _ in range(100):
            yield b"x" * 10_000

    response = await http.post("/v1/files", content=endless(), headers={"Content-Type": FORM})
    assert response.status_code == 413, response.text
    for _ in range(2):
        assert (await http.post("/v1/files", **form())).status_code == 200
    full = await http.post("/v1/files", **form())
    assert (full.status_code, "80000 are left" in full.text) == (400, True), full.text
    assert (await http.post("/v1/files", **form(b"x"))).status_code == 200
    assert "3 files are stored, as many as may be" in (await http.post("/v1/files", **form(b"x"))).text
    assert not [path for path in (tmp_path / "batches" / "files").iterdir() if path.name.endswith(".part")]


FORM = "multipart/form-data; boundary=b"


def bytes_of(content: bytes, name: str = "file", head: str = "") -> tuple[bytes, bytes]:
    """Return a form with a file in two parts: before the content's end, and the rest."""
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    disposition = f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\n{head}\r\n'.encode()
    return purpose + disposition + content, b"\r\n--b--\r\n"


WHOLE = b"".join(bytes_of(b"x"))


@pytest.mark.parametrize(
    ("content_type", "body", "status", "message"),
    [
        ("application/json", b"{}", 415, "multipart/form-data"),
        ("multipart/form-data", WHOLE, 400, "boundary"),
        ("multipart/form-data; boundary=" + "b" * 71, WHOLE, 400, "boundary"),
        (FORM, b"", 400, "before the last boundary"),
        (FORM, b"nothing", 400, "not valid multipart"),
        (FORM, WHOLE[:-8], 400, "before the last boundary"),
        (FORM, b"--b--\r\n", 400, ""),
        (FORM, b"".join(bytes_of(b"x", name="data")), 400, "no file"),
        (FORM, WHOLE.replace(b"batch", b"fine-tune"), 400, "purpose must be one of batch, vision, user_data"),
        (FORM, WHOLE.replace(b"batch", b"\xff"), 400, "not UTF-8"),
        (FORM, WHOLE.replace(b"batch", b"x" * (MAX_FIELD_BYTES + 1)), 400, "more than"),
        (FORM, b"".join(bytes_of(b"x", head="X: " + "x" * MAX_HEAD_BYTES + "\r\n")), 400, ""),
        (FORM, b"".join(bytes_of(b"x", head="X: x\r\n" * 100)), 400, ""),
        (FORM, bytes_of(b"x")[0] + b"\r\n" + WHOLE, 400, "twice"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' * (MAX_PARTS + 1) + WHOLE, 400, ""),
        (FORM, b"--b\r\n\r\n\r\n--b--\r\n", 400, "Content-Disposition"),
    ],
)
async def test_hostile_forms(
    http: httpx.AsyncClient, tmp_path: Path, content_type: str, body: bytes, status: int, message: str
) -> None:
    response = await http.post("/v1/files", content=body, headers={"Content-Type": content_type})
    assert (response.status_code, message in response.text) == (status, True), response.text
    assert not list((tmp_path / "batches" / "files").iterdir())


async def test_files_outlive_the_gateway_and_leftovers_do_not(socket_dir: Path, tmp_path: Path) -> None:
    options = limits(tmp_path)
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        file = (await http.post("/v1/files", **form())).json()
    files = tmp_path / "batches" / "files"
    (files / "file-1.part").write_bytes(b"half")
    (files / "file-2.json").write_bytes(b"{")
    (files / "file-3").write_bytes(b"no description")
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        assert (await http.get("/v1/files")).json()["data"] == [file]
        assert (await http.get(f"/v1/files/{file['id']}/content")).content == CONTENT
        assert {path.name for path in files.iterdir()} == {file["id"], f"{file['id']}.json"}
        assert "tokenloom_stored_file_bytes 360000.0" in (await http.get("/metrics")).text


@pytest.mark.parametrize("damage", ["a flipped bit", "a swap", "a cut"])
async def test_damaged_files_are_not_served_and_left_for_the_operator(
    socket_dir: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose tenant has another name now would be another tenant's."""
    options = limits(tmp_path)
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        ids = [(await http.post("/v1/files", **form(content))).json()["id"] for content in (CONTENT, b"x")]
    files = tmp_path / "batches" / "files"
    first, second = (files / f"{file_id}.json" for file_id in ids)
    if damage == "a flipped bit":
        first.write_bytes(first.read_bytes().replace(b'"tenant":"key:', b'"tenant":"kez:'))
        damaged = {ids[0]}
    elif damage == "a swap":
        contents = first.read_bytes(), second.read_bytes()
        second.write_bytes(contents[0])
        first.write_bytes(contents[1])
        damaged = {*ids}
    else:
        (files / ids[0]).write_bytes(CONTENT[:-1])
        damaged = {ids[0]}
    before = {path.name for path in files.iterdir()}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        assert {each["id"] for each in (await http.get("/v1/files")).json()["data"]} == {*ids} - damaged
    assert {path.name for path in files.iterdir()} == before
    assert caplog.text.count("is not served and left as it is") == len(damaged)


async def test_content_that_was_damaged_is_not_sent(http: httpx.AsyncClient, tmp_path: Path) -> None:
    file = (await http.post("/v1/files", **form())).json()
    path = tmp_path / "batches" / "files" / file["id"]
    path.write_bytes(b"\x01" + CONTENT[1:])
    response = await http.get(f"/v1/files/{file['id']}/content")
    assert (response.status_code, "upload it again" in response.text) == (500, True)
    path.write_bytes(CONTENT)
    assert (await http.get(f"/v1/files/{file['id']}/content")).content == CONTENT


async def test_files_of_an_older_gateway_have_no_checksum(socket_dir: Path, tmp_path: Path) -> None:
    options = limits(tmp_path)
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        file = (await http.post("/v1/files", **form())).json()
    path = tmp_path / "batches" / "files" / f"{file['id']}.json"
    described = json.loads(path.read_bytes())
    assert described.pop("description_crc32")
    assert described.pop("crc32")
    path.write_text(json.dumps(described))
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http(headers=KEYS) as http:
        assert (await http.get("/v1/files")).json()["data"] == [file]
        assert (await http.get(f"/v1/files/{file['id']}/content")).content == CONTENT


async def test_without_a_directory_the_answer_names_the_flag(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway() as mesh, mesh.http() as http:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/x/content"), ("POST", "/v1/batches")):
            response = await http.request(method, path)
            assert (response.status_code, "--batch-dir DIR" in response.text) == (404, True)


async def test_uploads_that_have_not_arrived_count_for_the_limit(socket_dir: Path, tmp_path: Path) -> None:
    """The sixty uploads of a test put 53 times the limit of their tenant on disk, or were all refused half-way."""
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer a\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 460000\r\n\r\n"
    )
    async with FakeMesh(socket_dir).gateway(**limits(tmp_path) | {"tenant_files": 100}) as mesh:
        host, _, port = mesh.http_address.rpartition(":")
        answers: list[asyncio.Task[bytes]] = []
        writers = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.format(mesh.http_address).encode())
            writers.append(writer)
            answers.append(asyncio.create_task(reader.read(4096)))
        refused: set[asyncio.Task[bytes]] = set()
        async with asyncio.timeout(30):
            while len(refused) < 4:
                refused, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)
        assert all(b"800000 bytes may be stored, of which 11072 are left" in task.result() for task in refused)
        assert len(refused) == 4, "two uploads of this size fit"
        for writer in writers:
            writer.close()
        await asyncio.gather(*answers)
        async with mesh.http(headers=KEYS) as http:
            while (await http.post("/v1/files", **form())).status_code != 200:
                pass  # until the gateway has seen that the others are gone
