"""Files and batches on one disk: clients upload, create, look, cancel and delete, while lines are answered."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from tests.explorer.clients import Answer, Clients, two_tenants
from tests.explorer.world import PATIENCE, World
from tokenloom.services.gateway.batches import batch_store
from tokenloom.services.gateway.batches.batches_api import Batches
from tokenloom.services.gateway.http.app import App
from tokenloom.services.gateway.http.internal_call import InternalResponse
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.tenants.tenant import Tenant

_MESH: dict[str, Any] = {
    "tokenizers": ("unix:/none",),
    "output_processors": ("unix:/none",),
    "coordinator": "unix:/none",
}
SETTINGS = GatewaySettings.of(**_MESH, batch_concurrency=4)
LIMITED = GatewaySettings.of(**_MESH, tenant_files=2, tenant_file_bytes=300, max_file_bytes=250)
NUM_LINES = 3
MAX_KEPT = 2
"""Batches that are kept of a tenant where few are: as many as a test can create."""
_DIGITS = re.compile("[0-9a-f]{32}")
_ENDED = ("completed", "failed", "expired", "cancelled")
FORM = [(b"content-type", b"multipart/form-data; boundary=b")]


def form(content: bytes) -> bytes:
    """Return the form that uploads a file."""
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return purpose + head + content + b"\r\n--b--\r\n"


def lines(tenant: str) -> bytes:
    """Return the input of a batch."""
    line = {"url": "/v1/completions", "body": {}}
    return b"".join(json.dumps({"custom_id": f"{tenant}{i}", **line}).encode() + b"\n" for i in range(NUM_LINES))


class _Calls:
    """Answers the lines of batches after a while."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answered: Counter[tuple[str, str]] = Counter()

    async def post(self, path: str, body: bytes, tenant: Tenant) -> InternalResponse:
        await self._world.step(6)
        return InternalResponse(200, {}, b'{"ok":1}')


class Store:
    """Holds one process that keeps files and runs batches."""

    def __init__(self, world: World, settings: GatewaySettings = SETTINGS) -> None:
        self.world = world
        self.calls = _Calls(world)
        self.clients: Clients = two_tenants(world)
        host: Any = SimpleNamespace(metrics=CollectorRegistry(), random=Random(0))
        self._batches = Batches(settings, world.directory, host, self.clients.keys)
        self.app: App = self.clients.application(self._batches.routes)

    async def open(self) -> None:
        """Read what is there, and go on with it."""
        await self._batches.open()
        self._batches.start(self.calls)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Leave the folder to another process."""
        await self._batches.close()

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """Send a request whose client may leave, and check that no fault of ours ends it."""
        answer = await self.clients.send(self.app, method, path, body, **options)
        is_ours = answer.status >= 500 and not self.world.disk.has_failed and b"stopped" not in answer.body
        self.world.check(not is_ours, f"{method} {path.split('/')[2]} answers {answer.status} {answer.body[:160]!r}")
        return answer

    async def get(self, path: str, tenant: str) -> Any:
        """Read something, undisturbed."""
        return (await self.clients.send(self.app, "GET", path, tenant=tenant, may_leave=False)).json()

    async def listed(self, what: str) -> dict[str, Any]:
        """Return all batches or files, by id."""
        pages = [await self.get(f"/v1/{what}", tenant) for tenant in ("a", "b")]
        return {each["id"]: each for page in pages for each in page["data"]}

    async def all_ended(self) -> dict[str, Any]:
        """Wait until all batches have ended, and return them."""
        for _ in range(int(PATIENCE / 60)):
            batches = await self.listed("batches")
            if all(batch["status"] in _ENDED for batch in batches.values()):
                break
            await asyncio.sleep(60)
        for batch in batches.values():
            self.world.check(batch["status"] in _ENDED, f"a batch stays {batch['status']}")
        return batches

    async def check(self, *, keeps_all: bool = True) -> None:
        """Check that the disk holds what clients are shown, and nothing else. ``keeps_all``: no batch was dropped; the
        files of such a one stay."""
        batches, files = await self.all_ended(), await self.listed("files")
        check, directory = self.world.check, self.world.directory
        for batch in batches.values():
            self._check_batch(batch, files)
        owned = {batch[kind] for batch in batches.values() for kind in ("output_file_id", "error_file_id")}
        for file in files.values():
            path = directory / "files" / file["id"]
            check(path.is_file() and path.stat().st_size == file["bytes"], "a listed file is not on the disk as listed")
            check(not keeps_all or file["purpose"] == "batch" or file["id"] in owned, "results have no batch")
        kept = {path.name for path in (directory / "batches").iterdir()}
        check(kept == {f"{name}.json" for name in batches}, f"batches/ holds {_strange(kept, batches)}")
        kept = {path.name for path in (directory / "files").iterdir()}
        known = {name for file in files for name in (file, f"{file}.json")}
        check(kept == known, f"files/ holds {_strange(kept, files)}")
        self.clients.check_all_given_back()

    def _check_batch(self, batch: Any, files: dict[str, Any]) -> None:
        check, counts = self.world.check, batch["request_counts"]
        path = self.world.directory / "batches" / f"{batch['id']}.json"
        stored = json.loads(path.read_bytes())["status"] if path.is_file() else "missing"
        check(stored == batch["status"], f"a batch is {batch['status']}, and {stored} on the disk")
        if batch["status"] == "failed" and not self.world.disk.has_failed:
            check(False, f"a batch has failed without a reason: {batch['errors']['data']}")
        if batch["status"] == "completed":
            check(counts["completed"] == NUM_LINES, f"a completed batch has {counts}")
        for kind, number in (("output_file_id", counts["completed"]), ("error_file_id", counts["failed"])):
            path = self.world.directory / "files" / str(batch[kind])
            if number and check(batch[kind] in files, f"a batch with {counts} has no {kind}"):
                found = path.read_bytes().splitlines()
                check(len(found) == number, f"{len(found)} results of a batch with {counts}")
                ids = {json.loads(line)["custom_id"] for line in found}
                check(len(ids) == number, "a line has two results")


def _strange(kept: set[str], known: dict[str, Any]) -> str:
    """Return the kinds of names that should not be there, or are missing."""
    expected = {name for each in known for name in (each, f"{each}.json")}
    kinds = {_DIGITS.sub("…", name) for name in kept - expected}
    return ", ".join(sorted(kinds)) or "less than it should"


class BatchScenario:
    """Two tenants create batches, look at them, cancel them and delete files, all at the same time."""

    uses_disk = True

    async def run(self, world: World) -> None:
        world.memory.update(files={}, batches={})
        store = Store(world)
        await store.open()
        world.disk.may_be_full = True
        for tenant in ("a", "b"):
            world.begin(_use(store, tenant), f"tenant {tenant}")
        await world.all_ended()
        await store.check()
        await store.close()

    async def recover(self, world: World) -> None:
        await recover(world, SETTINGS)


async def recover(world: World, settings: GatewaySettings) -> None:
    """Begin again, and check that nothing is lost that a client has seen, or that was on the disk."""
    collected = _collected(world.directory / "batches")
    store = Store(world, settings)
    await store.open()
    files = await store.listed("files")
    for file_id in world.memory["files"]:
        world.check(file_id in files, "a file is lost that a client had been shown")
    batches = await store.all_ended()
    for batch_id, before in world.memory["batches"].items():
        if world.check(batch_id in batches, "a batch is lost that a client had been shown"):
            after = batches[batch_id]["status"]
            is_same = before not in _ENDED or after == before
            world.check(is_same, f"a batch that was {before} is {after} after a crash")
    for batch_id, number in collected.items():
        if batch_id in batches:
            counts = batches[batch_id]["request_counts"]
            world.check(counts["completed"] >= number, f"{number} answers were there, and {counts} after a crash")
    await store.check()
    await store.close()


def _collected(directory: Path) -> dict[str, int]:
    """Return how many answers of each batch are on the disk."""
    return {path.stem: path.read_bytes().count(b"\n") for path in directory.glob("*.output")}


class KeptBatchScenario:
    """One tenant creates batches at the same time, of which only a few are kept once they have ended."""

    uses_disk = True

    async def run(self, world: World) -> None:
        world.memory.update(files={}, batches={})
        with patch.object(batch_store, "MAX_KEPT", MAX_KEPT):
            store = Store(world)
            await store.open()
            world.disk.may_be_full = True
            world.begin(_create_many(store), "tenant a")
            await world.all_ended()
            await store.check(keeps_all=False)
            await store.close()

    async def recover(self, world: World) -> None:
        with patch.object(batch_store, "MAX_KEPT", MAX_KEPT):
            store = Store(world)
            await store.open()
            await store.check(keeps_all=False)
            await store.close()


async def _create_many(store: Store) -> None:
    """Create some batches, wait until they have ended, and create more than are kept."""
    uploaded = await store.ask("POST", "/v1/files", form(lines("a")), headers=FORM)
    if not uploaded.is_ok:
        return
    body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    for number in (MAX_KEPT, MAX_KEPT + 1):
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(store.ask("POST", "/v1/batches", body))
                await store.world.step(3)
        await store.all_ended()


class FileScenario:
    """One tenant uploads more files at once than it may store, and deletes some."""

    uses_disk = True

    async def run(self, world: World) -> None:
        world.memory.update(files={}, batches={})
        store = Store(world, LIMITED)
        await store.open()
        world.disk.may_be_full = True
        for number in range(5):
            world.begin(_upload(store, bytes(100 + number)), f"upload {number}")
        while any(task.get_name().startswith("upload") for task in asyncio.all_tasks()):
            await world.loop.idle()
            await asyncio.sleep(1)
        files = list((await store.listed("files")).values())
        world.check(len(files) <= LIMITED.tenant_files, f"{len(files)} files are stored; {LIMITED.tenant_files} may be")
        num_bytes = sum(file["bytes"] for file in files)
        world.check(num_bytes <= LIMITED.tenant_file_bytes, "more bytes are stored than may be")
        await world.all_ended()
        world.disk.may_be_full = False
        await store.check()
        if not world.violations:
            await _fill(store)
        await store.close()

    async def recover(self, world: World) -> None:
        await recover(world, LIMITED)


async def _upload(store: Store, content: bytes) -> None:
    memory = store.world.memory
    await store.world.step(10)
    uploaded = await store.ask("POST", "/v1/files", form(content), headers=FORM)
    if uploaded.is_ok:
        memory["files"][uploaded.json()["id"]] = "a"
        if store.world.random.random() < 0.3:
            await store.world.step(10)
            memory["files"].pop(uploaded.json()["id"])
            await store.ask("DELETE", f"/v1/files/{uploaded.json()['id']}")


async def _fill(store: Store) -> None:
    """Check that as many files fit as may be stored: what was refused or deleted takes no room."""
    store.world.memory["files"].clear()
    for file_id in await store.listed("files"):
        await store.clients.send(store.app, "DELETE", f"/v1/files/{file_id}", may_leave=False)
    for _ in range(LIMITED.tenant_files):
        answer = await store.clients.send(
            store.app, "POST", "/v1/files", form(bytes(100)), headers=FORM, may_leave=False
        )
        store.world.check(answer.is_ok, f"a file is refused although there is room: {answer.body!r}")


async def _use(store: Store, tenant: str) -> None:
    world, memory = store.world, store.world.memory

    async def seen(batch_id: str, **options: Any) -> None:
        answer = await store.ask(*options.pop("what"), tenant=tenant, **options)
        if answer.is_ok:
            memory["batches"][batch_id] = answer.json()["status"]

    uploaded = await store.ask("POST", "/v1/files", form(lines(tenant)), tenant=tenant, headers=FORM)
    if not uploaded.is_ok:
        return
    file_id = uploaded.json()["id"]
    memory["files"][file_id] = tenant
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    created = await store.ask("POST", "/v1/batches", body, tenant=tenant)
    if not created.is_ok:
        return
    path = f"/v1/batches/{created.json()['id']}"
    memory["batches"][created.json()["id"]] = created.json()["status"]
    await world.step(40)
    batch_id = created.json()["id"]
    whats = [("POST", f"{path}/cancel"), ("GET", path), ("DELETE", f"/v1/files/{file_id}")]
    whats += [("POST", f"{path}/cancel")] if world.random.random() < 0.5 else []
    world.random.shuffle(whats)
    async with asyncio.TaskGroup() as group:
        for what in whats:
            if what[0] == "DELETE":
                memory["files"].pop(file_id, None)
                group.create_task(store.ask(*what, tenant=tenant))
            else:
                group.create_task(seen(batch_id, what=what))
            await world.step(5)
