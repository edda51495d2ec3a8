"""Weights that come piece by piece become a checkpoint, or nothing; what does not fit is found in their header."""

import fcntl
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tokenloom.model_files import staged_weights
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.model_files.staged_weights import StagedWeights
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0, **changed: torch.Tensor) -> Tensors:
    torch.manual_seed(seed)
    made = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5, dtype=torch.bfloat16), "empty": torch.zeros(0, 2)}
    return {**made, **changed}


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    path = tmp_path / "loaded"
    (path / "1_Pooling").mkdir(parents=True)
    (path / "config.json").write_text('{"vocab_size": 5}')
    (path / "1_Pooling" / "config.json").write_text("{}")
    (path / "other.bin").write_bytes(b"weights of another format")
    save_file(tensors(), path / "model.safetensors")
    return path


@pytest.fixture
def staged(tmp_path: Path, loaded: Path) -> Iterator[StagedWeights]:
    made = StagedWeights(tmp_path / "staged", loaded)
    yield made
    made.close()


def stage(staged: StagedWeights, data: bytes, piece: int = 1 << 20) -> tuple[Path, bytes]:
    incoming = staged.begin()
    try:
        for start in range(0, len(data), piece):
            incoming.write(data[start : start + piece])
        return incoming.finish()
    finally:
        incoming.discard()


def names(staged: StagedWeights) -> list[str]:
    return sorted(entry.name for entry in staged._folder.iterdir())


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 20])
def test_pieces_become_a_checkpoint_of_the_loaded_model(staged: StagedWeights, piece: int) -> None:
    path, fingerprint = stage(staged, save(tensors(1)), piece)
    assert fingerprint == weights_fingerprint(path)
    assert names(staged) == [fingerprint.hex()]
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == [
        *("1_Pooling/config.json", "config.json", "model.safetensors")
    ]
    loaded = load_file(path / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors(1).items())


def test_the_same_weights_are_one_checkpoint(staged: StagedWeights) -> None:
    assert stage(staged, save(tensors(1))) == stage(staged, save(tensors(1)))
    assert len(names(staged)) == 1


def test_a_stream_that_ends_early_leaves_nothing(staged: StagedWeights) -> None:
    data = save(tensors(1))
    for length in (0, 5, 8, 30, len(data) // 2, len(data) - 1):
        with pytest.raises(InvalidArgument, match="ends too early"):
            stage(staged, data[:length])
    incoming = staged.begin()
    incoming.write(data)
    incoming.discard()  # it was cut before its end was known
    incoming.discard()
    assert names(staged) == []
    with pytest.raises(InvalidArgument, match="goes on after the last tensor"):
        stage(staged, data + b"\0")


def edited(change: Any) -> bytes:
    data = save(tensors())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def entry(name: str, **members: object) -> Any:
    return lambda header: header[name].update(members)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            save({name: tensor for name, tensor in tensors().items() if name != "empty"}),
            "lacks empty, which the loaded",
        ),
        (save(tensors(more=torch.zeros(1))), "has more, which the loaded checkpoint lacks"),
        (save(tensors(**{"a.weight": torch.zeros(4, 3)})), r"a.weight is F32 \[4, 3\].*has F32 \[3, 4\]"),
        (save(tensors(**{"a.weight": torch.zeros(3, 4).half()})), r"a.weight is F16 \[3, 4\].*has F32"),
        (struct.pack("<Q", 1 << 60), "its header has 1152921504606846976 bytes"),
        (struct.pack("<Q", 0), "its header is empty"),
        (edited(lambda _: b"{" + b" " * 20), "no safetensors file"),
        (edited(lambda _: b"[1, 2]"), "no JSON object"),
        (edited(lambda _: b"[" * 5000), "no safetensors file: its header is nested too deeply"),
        (edited(lambda _: b"\xff\xfe\xff"), "no safetensors file"),
        (edited(lambda header: json.dumps(header).encode("utf-16")), "no safetensors file"),
        (edited(lambda _: b'{"a.weight": 1, "a.weight": 2}'), "a.weight twice"),
        (edited(entry("a.weight", shape=[True, 12])), "a.weight in its header is malformed"),
        (edited(entry("a.weight", shape=[-3, -4])), "a.weight in its header is malformed"),
        (edited(entry("a.weight", shape=3)), "a.weight in its header is malformed"),
        (edited(entry("a.weight", data_offsets=[0])), "a.weight in its header is malformed"),
        (edited(entry("a.weight", data_offsets=[0, 40.0])), "a.weight in its header is malformed"),
        (edited(entry("a.weight", data_offsets=[48, 0])), "offsets of a.weight"),
        (edited(entry("a.weight", data_offsets=[0, 1 << 62])), "offsets of a.weight"),
        (edited(entry("b.weight", data_offsets=[0, 10])), "offsets of "),
    ],
)
def test_what_does_not_fit_is_found_in_the_header(staged: StagedWeights, data: bytes, words: str) -> None:
    incoming = staged.begin()
    with pytest.raises(InvalidArgument, match=words):
        incoming.write(data)
    incoming.discard()
    assert names(staged) == []


def test_a_full_folder_is_told(staged: StagedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match="No space left on device"):
        stage(staged, save(tensors(1)))
    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(ResourceExhausted, match="No space left on device"):
        staged.begin()
    assert names(staged) == []


def test_what_others_remove_meanwhile_is_no_error(staged: StagedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one host share a folder, and each removes what is old in it."""
    first, second = stage(staged, save(tensors(1))), stage(staged, save(tensors(2)))
    lstat, open_, flock = Path.lstat, os.open, fcntl.flock
    lost: list[Path] = []

    def lstat_late(path: Path) -> os.stat_result:
        if path == first[0]:
            shutil.rmtree(path, ignore_errors=True)
        return lstat(path)

    def open_late(path: Any, *args: Any, **options: Any) -> int:
        if isinstance(path, Path) and path.name.startswith(".part") and len(lost) < 2:
            lost.append(path)
            path.rmdir()
        return open_(path, *args, **options)

    def flock_late(file: int, how: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if how == fcntl.LOCK_SH and path == second[0]:
            shutil.rmtree(path)
        flock(file, how)

    monkeypatch.setattr(Path, "lstat", lstat_late)
    monkeypatch.setattr("os.open", open_late)
    monkeypatch.setattr("fcntl.flock", flock_late)
    assert stage(staged, save(tensors(2))) == second, "it is removed after it was found"
    assert len(lost) == 2
    assert weights_fingerprint(second[0]) == second[1]
    assert names(staged) == [second[0].name]


def test_a_folder_that_was_removed_is_made_again(staged: StagedWeights) -> None:
    staged._folder.rmdir()
    stage(staged, save(tensors(1)))
    assert staged._folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(staged._folder)
    staged._folder.mkdir()
    staged._folder.chmod(0o777)  # by another user, where anybody may make one
    with pytest.raises(FailedPrecondition, match="may be written to by other users"):
        staged.begin()


def test_the_folders_of_a_read_only_model_can_be_written_here(staged: StagedWeights, loaded: Path) -> None:
    for folder in (loaded / "1_Pooling", loaded):
        folder.chmod(0o555)
    path, _ = stage(staged, save(tensors(1)))
    assert [folder.stat().st_mode & 0o700 for folder in (path, path / "1_Pooling")] == [0o700, 0o700]
    assert (path / "1_Pooling" / "config.json").read_text() == "{}"


def test_a_checkpoint_has_its_bytes_before_its_name(staged: StagedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, whose machine may lose its power in between."""
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(file: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    def note_rename(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    stage(staged, save(tensors(1)))
    assert calls.index("model.safetensors") < calls.index("rename")


def test_the_latest_is_what_was_complete_last(staged: StagedWeights) -> None:
    slow = staged.begin()
    quick = [stage(staged, save(tensors(seed)))[0] for seed in (2, 3)]
    slow.write(save(tensors(1)))
    path, _ = slow.finish()
    staged.begin().discard()
    assert names(staged) == sorted(each.name for each in (path, quick[-1]))


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path("/dev/shm") / f"tokenloom-test-{secrets.token_hex(6)}"
    yield path
    path.unlink(missing_ok=True)


def test_shared_memory_is_copied(staged: StagedWeights, shared: Path) -> None:
    data = save(tensors(2))
    shared.write_bytes(data + bytes(5000))  # as a segment that is larger than what it holds
    incoming = staged.begin()
    incoming.copy_shared_memory(shared.name)
    path, _ = incoming.finish()
    shared.write_bytes(bytes(10))
    assert (path / "model.safetensors").read_bytes() == data


@pytest.mark.parametrize("name", ["../etc/passwd", "..", ".", "", "a/b", "tokenloom-test-absent"])
def test_other_names_are_refused(staged: StagedWeights, name: str) -> None:
    incoming = staged.begin()
    with pytest.raises(InvalidArgument, match=r"shared_memory must be|no shared memory of this name"):
        incoming.copy_shared_memory(name)
    incoming.discard()


def test_links_and_pipes_are_no_shared_memory(staged: StagedWeights, shared: Path, tmp_path: Path) -> None:
    incoming = staged.begin()
    shared.symlink_to(tmp_path / "loaded" / "model.safetensors")
    with pytest.raises(InvalidArgument, match="no shared memory"):
        incoming.copy_shared_memory(shared.name)
    shared.unlink()
    os.mkfifo(shared)
    with pytest.raises(InvalidArgument, match="another user"):
        incoming.copy_shared_memory(shared.name)
    incoming.discard()


def test_the_latest_and_the_loaded_checkpoints_are_kept(staged: StagedWeights, loaded: Path) -> None:
    def put(seed: int) -> Path:
        path, _ = stage(staged, save(tensors(seed)))
        os.utime(path, ns=(seed, seed))
        return path

    first = put(1)
    staged.use(first)
    other = StagedWeights(staged._folder, loaded)  # of another engine of the host
    later = [put(seed) for seed in range(2, 6)]
    assert staged.loaded == first
    staged.begin().discard()
    assert names(staged) == sorted(path.name for path in (first, *later[-2:]))
    other.use(later[-2])
    staged.use(later[-1])
    newest = [put(6), put(7)]
    staged.begin().discard()
    assert names(staged) == sorted(path.name for path in (*later[-2:], *newest)), "each of the two has one of them"
    other.close()
    staged.begin().discard()
    assert names(staged) == sorted(path.name for path in (later[-1], *newest))


def test_what_a_killed_process_has_left_is_removed(staged: StagedWeights) -> None:
    left = staged._folder / ".part-left"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    live = staged.begin()
    assert not left.exists()
    other = staged.begin()  # does not remove what comes at the same time
    live.write(save(tensors(1)))
    assert live.finish()[0].is_dir()
    other.discard()
    assert len(names(staged)) == 1


def test_a_folder_of_others_is_refused(tmp_path: Path, loaded: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InvalidArgument, match="may be written to by other users"):
        StagedWeights(folder, loaded)
    with pytest.raises(InvalidArgument, match="Not a directory"):
        StagedWeights(loaded / "config.json" / "below", loaded)
    assert oct((StagedWeights(tmp_path / "new", loaded)._folder).stat().st_mode)[-3:] == "700"


def test_only_safetensors_are_replaced(tmp_path: Path, loaded: Path, staged: StagedWeights) -> None:
    (loaded / "model.safetensors").rename(loaded / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match="of another format"):
        StagedWeights(tmp_path / "x", loaded)
    with pytest.raises(FailedPrecondition, match="of another format"):
        staged.begin()
    (loaded / "model.safetensors").write_bytes(b"\0" * 5)
    with pytest.raises(FailedPrecondition, match="cannot be read any more"):
        staged.begin()


def test_a_lock_that_is_taken_from_another_process_keeps_a_folder(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    staged_weights.remove_if_unlocked(tmp_path)
    assert tmp_path.exists()
    os.close(held)
    staged_weights.remove_if_unlocked(tmp_path)
    assert not tmp_path.exists()
