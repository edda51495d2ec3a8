"""The folders of a whole mesh are on a disk that is full, fails or tears writes: errors are typed, a batch can be
cancelled, files can be deleted, and nothing comes back after a restart."""

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.harness import VOCAB_SIZE
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

LINES = 200
SOON = 60.0
WHOLE, FULL, TORN, BROKEN = b"0", b"N", b"T", b"E"
"""What the disk does; ``disk_faults.c`` explains it."""


class FaultyDisk:
    """A folder for batches and files, whose writes fail as :meth:`be` says; those of the mesh's own files, too."""

    def __init__(self, directory: Path) -> None:
        self.batches = directory / "batches"
        self._mode = directory / "mode"
        self._mode.write_bytes(WHOLE)
        library = directory / "disk_faults.so"
        source = Path(__file__).with_name("disk_faults.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "DISK_FAULTS_UNDER": f"{self.batches}:/tmp/tl-",
            "DISK_FAULTS_MODE": str(self._mode),
            "TOKENLOOM_HASH_STEP_SECONDS": "0.05",
        }

    def be(self, mode: bytes) -> None:
        with open(self._mode, "r+b") as file:  # in place: the processes map it
            file.write(mode)


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    with tempfile.TemporaryDirectory(prefix="disk-", dir="/tmp") as directory:
        yield FaultyDisk(Path(directory))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


class Client:
    """A client of the mesh's files and batches."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=SOON)
        self.close = self._http.close

    def ask(self, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
        response = self._http.request(method, path, **arguments)
        if response.status_code != 200:
            assert response.status_code in (400, 503), response.text
            assert response.json()["error"]["message"], "the error is typed"
        return response.status_code, response.json()

    def upload(self) -> tuple[int, Any]:
        body = {"model": "tokenloom-demo", "prompt": [7] * 20, "max_tokens": 200, "ignore_eos": True}
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(LINES)]
        content = "\n".join(map(json.dumps, lines))
        return self.ask("POST", "/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})

    def create(self, file: Any) -> tuple[int, Any]:
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return self.ask("POST", "/v1/batches", json=fields)

    def status(self, batch: Any) -> str:
        return str(self.ask("GET", f"/v1/batches/{batch['id']}")[1]["status"])

    def running_batch(self) -> tuple[Any, Any]:
        _, file = self.upload()
        _, batch = self.create(file)
        until(lambda: self.status(batch) == "in_progress")
        return file, batch

    def answers(self) -> bool:
        body = {"model": "tokenloom-demo", "prompt": [5, 6], "max_tokens": 2}
        return self.ask("POST", "/v1/completions", json=body)[0] == 200


def deleted(client: Client, file: Any) -> bool:
    return client.ask("DELETE", f"/v1/files/{file['id']}")[0] == 200


def cancelled(client: Client, batch: Any) -> bool:
    return client.ask("POST", f"/v1/batches/{batch['id']}/cancel")[0] == 200


def test_what_a_disk_refuses_is_typed_and_what_clients_end_stays_ended(serve: Any, disk: FaultyDisk) -> None:
    arguments = ("--worker", "hash", "--batch-dir", str(disk.batches))
    mesh = serve(*arguments, **disk.environment)
    with closing(Client(mesh.url)) as client:
        files = [client.upload()[1] for _ in range(3)]
        batches = [client.running_batch() for _ in range(3)]
        before = {process.pid for process in mesh.family()}

        disk.be(BROKEN)
        assert client.upload()[0] == 503
        assert client.create(files[0])[0] == 503
        assert not cancelled(client, batches[0][1])
        assert not deleted(client, files[0])
        assert client.answers()
        disk.be(WHOLE)
        until(lambda: cancelled(client, batches[0][1]))

        for mode, (file, batch), unused in ((TORN, batches[1], files[1]), (FULL, batches[2], files[2])):
            disk.be(mode)
            assert client.upload()[0] == 503
            assert client.create(files[0])[0] == 503
            assert cancelled(client, batch)
            assert client.status(batch) == "cancelling"
            assert deleted(client, unused)
            until(lambda file=file: deleted(client, file))  # type: ignore[misc]
            assert client.answers()
        assert {process.pid for process in mesh.family()} == before, "no part ends for it"

    mesh.stop(signal.SIGKILL)
    disk.be(WHOLE)
    with closing(Client(serve(*arguments, **disk.environment).url)) as client:
        for _, batch in batches:
            until(lambda batch=batch: client.status(batch) == "cancelled")  # type: ignore[misc]
        left = {each["id"] for each in client.ask("GET", "/v1/files")[1]["data"] if each["purpose"] == "batch"}
        assert left == {files[0]["id"], batches[0][0]["id"]}
        assert client.answers()


def hits(mesh: Any) -> float:
    """Prompt tokens whose KV came from the offload file."""
    (address,) = (part["metrics"] for part in mesh.ps() if part["service"] == "engine")
    text = httpx.get(f"http://{address}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(float(line.split()[-1]) for line in lines)


def test_an_offload_file_on_such_a_disk_costs_a_recompute_and_no_token(serve: Any, disk: FaultyDisk) -> None:
    offload = ("--num-kv-blocks", "40", "--kv-offload-path", str(disk.batches), "--kv-offload-bytes", "64000000")
    disk.batches.mkdir()
    mesh = serve("--worker", "hash", *offload, **disk.environment | {"TOKENLOOM_HASH_STEP_SECONDS": "0"})
    prompts = [[2 + number] * 200 for number in range(8)]  # more than the pool holds at once

    with httpx.Client(base_url=mesh.url, timeout=SOON) as client:

        def ask_all() -> None:
            for prompt in prompts:
                body = {"model": "tokenloom-demo", "prompt": prompt, "max_tokens": 4, "return_token_ids": True}
                choice = client.post("/v1/completions", json=body).json()["choices"][0]
                assert choice["token_ids"] == expected_tokens(prompt, 4, VOCAB_SIZE)

        before = {process.pid for process in mesh.family()}
        for mode in (WHOLE, FULL, TORN, BROKEN, WHOLE):
            disk.be(mode)
            known = hits(mesh)
            for _ in range(2):
                ask_all()
            if mode == WHOLE:
                assert hits(mesh) > known, "the file is used again"
        assert {process.pid for process in mesh.family()} == before, "no part ends for it"
