"""What a tenant may store, also with several uploads at once and a disk that fails."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.services.gateway.files.failing_disk import InlineThreads, Writes
from tokenloom.request.errors import FailedPrecondition, NotFound, PayloadTooLarge, TokenloomError
from tokenloom.services.gateway.files import file_store
from tokenloom.services.gateway.files.disk import Disk
from tokenloom.services.gateway.files.file_store import FileLimits, FileStore, StoredFile, new_file_id


async def opened(directory: Path, limits: FileLimits) -> FileStore:
    disk = Disk(directory, InlineThreads())
    store = FileStore(disk, limits, lambda: 1.0)
    (directory / "files").mkdir(exist_ok=True)
    await store.open()
    return store


@pytest.fixture
async def store(tmp_path: Path) -> FileStore:
    return await opened(tmp_path, FileLimits(1000, 2000, 3))


async def upload(store: FileStore, size: int, tenant: str = "t") -> StoredFile:
    file_id = new_file_id()
    store.partial_path(file_id).write_bytes(b"x" * size)
    return await store.add_upload(file_id, tenant, name="n", purpose="batch", size=size)


@pytest.mark.parametrize(("size", "most"), [(900, 2), (1, 3)])
async def test_uploads_at_once_stay_within_the_limits(store: FileStore, size: int, most: int) -> None:
    outcomes = await asyncio.gather(*(upload(store, size) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(outcome, StoredFile) for outcome in outcomes) == most == len(store.of("t"))
    assert sum(isinstance(outcome, FailedPrecondition) for outcome in outcomes) == 6 - most
    await upload(store, size, "another tenant")
    for file in store.of("t"):
        await store.delete(file.id, "t")
    await upload(store, size)


async def test_an_upload_that_was_cancelled_is_stored_or_gone(store: FileStore) -> None:
    for turns in range(6):
        uploading = asyncio.create_task(upload(store, 900))
        for _ in range(turns):
            await asyncio.sleep(0)
        uploading.cancel()
        await asyncio.wait([uploading])
        for file in store.of("t"):
            await store.delete(file.id, "t")
        with store.take("t", 3) as room:
            store.grow(room, "t", 1000)


async def test_an_upload_in_progress_counts(store: FileStore) -> None:
    with store.take("t") as first, store.take("t") as second, store.take("t") as third:
        store.grow(first, "t", 1000)
        store.grow(second, "t", 600)
        with pytest.raises(FailedPrecondition, match="2000 bytes may be stored, of which 400 are left"):
            store.grow(third, "t", 401)
        store.grow(third, "t", 400)
        with pytest.raises(PayloadTooLarge):
            store.grow(third, "t", 1001)
        with pytest.raises(FailedPrecondition, match="3 files are stored"):
            store.take("t")
    store.take("t", 3).release()


async def test_a_file_that_cannot_be_removed_is_still_there(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await upload(store, 900)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            await store.delete(file.id, "t")
    assert store.get(file.id, "t") == file
    await store.delete(file.id, "t")
    with pytest.raises(NotFound):
        store.get(file.id, "t")
    assert not list(store.path("x").parent.iterdir())


@pytest.mark.parametrize("name", ["replace", "sync"])
async def test_data_whose_new_place_is_not_durable_stays_where_it_was(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The results of a batch were lost until the next start, and a file that was refused came back with it."""
    file_id, calls, replace = new_file_id(), list[str](), os.replace
    path = store.partial_path(file_id)
    path.write_bytes(b"x" * 9)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def replaced(*names: Path) -> None:
        calls.append(str(names[0]))
        if len(calls) == 2:  # the first one is the description's
            refuse()
        replace(*names)

    async def adopt() -> StoredFile | None:
        with store.take("t") as room:
            store.grow(room, "t", 9)
            return await store.adopt(path, file_id, "t", name="n", purpose="batch_output", room=room)

    with monkeypatch.context() as patch:
        if name == "sync":
            patch.setattr(file_store, "sync_directory", refuse)
        else:
            patch.setattr(os, "replace", replaced)
        with pytest.raises(OSError, match="Input/output error"):
            await adopt()
    assert list(path.parent.iterdir()) == [path]
    stored = await adopt()
    assert stored is not None
    assert store.of("t") == [stored]


async def test_a_full_disk_gives_back_what_was_reserved(store: FileStore) -> None:
    with Writes().watched() as writes:
        writes.is_full = True
        for _ in range(4):
            with pytest.raises(OSError, match="No space left"):
                await upload(store, 900)
        writes.is_full = False
        for _ in range(2):
            await upload(store, 900)


async def test_lower_limits_keep_what_is_stored_and_refuse_more(store: FileStore, tmp_path: Path) -> None:
    for _ in range(3):
        file = await upload(store, 600)
    again = await opened(tmp_path, FileLimits(1000, 1000, 2))
    assert len(again.of("t")) == 3
    with pytest.raises(TokenloomError):
        await upload(again, 1)
    for each in again.of("t"):
        await again.delete(each.id, "t")
    assert (await upload(again, 600)).size == file.size


async def test_a_damaged_description_does_not_keep_the_gateway_from_starting(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "file-1.json").write_bytes(b'{"id":"\xff"}')
    assert not (await opened(tmp_path, FileLimits(1000, 1000, 2))).of("t")
    assert not list(directory.iterdir())


@pytest.mark.parametrize("length", [0, 9, -1])
async def test_a_file_outlives_the_loss_of_a_part_of_its_description(
    store: FileStore, tmp_path: Path, length: int
) -> None:
    file = await upload(store, 600)
    description = store.path(f"{file.id}.json")
    whole = description.read_bytes()
    description.write_bytes(whole[:length])
    assert not (await opened(tmp_path, FileLimits(1000, 1000, 2))).of("t")
    description.write_bytes(whole)  # by an operator, from a copy
    assert (await opened(tmp_path, FileLimits(1000, 1000, 2))).of("t") == [file]
