"""Records of requests: their lines, and the files that hold them."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.request import request_records
from tokenloom.request.request_records import (
    VERSION,
    DamagedLine,
    RecordedLeg,
    RecordedLogprobs,
    RecordedOutput,
    RecordedRequest,
    RecordFiles,
    floats,
    from_floats,
    read_records,
    repeats_exactly,
    sealed,
    unsealed,
)

DAY_MS = 86_400_000
NOON = 20_000 * DAY_MS + DAY_MS // 2


def record(id: str = "a" * 40, **values: Any) -> RecordedRequest:
    output = RecordedOutput(
        index=0,
        token_ids=[7, 8],
        finish_reason="length",
        logprobs=[RecordedLogprobs(sampled=floats([-0.1, float("-inf")]), ranks=[1, 2])],
    )
    known: dict[str, Any] = {
        "version": VERSION,
        "id": id,
        "model": "m",
        "path": "/models/m",
        "tokenizer": "ab",
        "release": "1.0",
        "began_ms": NOON,
        "ended_ms": NOON + 5,
        "prompt": [1, 2, 3],
        "sampling_params": {"seed": "18446744073709551615", "temperature": 0.7},
        "outputs": [output],
    }
    return RecordedRequest(**{**known, **values})


class Wall:
    """The wall clock of a test."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def make(tmp_path: Path, wall: Wall) -> Callable[..., RecordFiles]:
    def made(**options: Any) -> RecordFiles:
        given = {"max_bytes": 1 << 20, "days": 7, "now": wall, "epoch": 1, **options}
        return RecordFiles(tmp_path / "records", **given)

    return made


def ids(folder: Path) -> list[str]:
    return [each.id for each in read_records(folder) if isinstance(each, RecordedRequest)]


def test_a_record_comes_back_as_it_was() -> None:
    assert unsealed(sealed(record())) == record()
    assert from_floats(record().outputs[0].logprobs[0].sampled)[1] == float("-inf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda line: line.replace(b"[7,8]", b"[7,9]"), "was changed"),
        (lambda line: b"0" * 64 + line[64:], "was changed"),
        (lambda line: line[:-30] + b"\n", "was changed"),
        (lambda line: b"\n", "was changed"),
        (lambda line: line[:-1], "is not complete"),
    ],
)
def test_a_line_that_is_no_record(change: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unsealed(change(sealed(record())))


def test_a_record_of_a_newer_release_is_refused_by_its_form() -> None:
    with pytest.raises(ValueError, match="has the form 2, and this release reads 1"):
        unsealed(sealed(record(version=2)))


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"version":1,"id":3}'])
def test_what_has_its_checksum_and_is_no_record(body: bytes) -> None:
    line = sealed(record()).partition(b" ")
    digest = request_records.hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(ValueError, match="is no record of this release"):
        unsealed(digest + line[1] + body + b"\n")


def test_files_are_readable_by_their_owner_alone(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = make()
        files.open()
        files.write(sealed(record()))
    finally:
        os.umask(before)
    (path,) = (tmp_path / "records").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.name.startswith("requests-2024-10-04-")
    files.close()


def test_one_is_found_by_its_id_and_faults_have_their_places(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    files = make()
    files.open()
    for letter in "abc":
        files.write(sealed(record(letter * 40)))
    files.close()
    folder = tmp_path / "records"
    (path,) = folder.iterdir()
    assert [each.id for each in read_records(folder, "b" * 40) if not isinstance(each, DamagedLine)] == ["b" * 40]
    assert list(read_records(folder, "d" * 40)) == []
    path.write_bytes(path.read_bytes().replace(b'"id":"bbb', b'"id":"abb') + b"half a line")
    (changed, torn) = (each for each in read_records(folder) if isinstance(each, DamagedLine))
    assert changed.place == f"{path.name}:2"
    assert "was changed" in changed.reason
    assert torn.place == f"{path.name}:4"
    assert "is not complete" in torn.reason
    assert ids(folder) == ["a" * 40, "c" * 40]
    # A word of another request's text is not its id.
    assert not [each for each in read_records(folder, "length") if not isinstance(each, DamagedLine)]


def test_each_day_has_files_of_its_own_and_old_ones_go(
    make: Callable[..., RecordFiles], wall: Wall, tmp_path: Path
) -> None:
    files = make(days=2)
    files.open()
    folder = tmp_path / "records"
    (folder / "requests-2020-13-45-1-1-1.jsonl").write_text("no day of the calendar")
    (folder / "other").write_text("not ours")
    for day in range(5):
        wall.now = NOON + day * DAY_MS
        files.write(sealed(record(str(day) * 40)))
    assert ids(folder) == ["4" * 40, "3" * 40, "2" * 40]  # the newest file first
    wall.now += 10 * DAY_MS
    files.expire()  # the file that is written to, too
    assert ids(folder) == []
    files.write(sealed(record("f" * 40)))
    assert ids(folder) == ["f" * 40]
    assert (folder / "other").exists()
    files.close()


def test_the_bound_is_kept_by_removing_the_oldest(make: Callable[..., RecordFiles], wall: Wall, tmp_path: Path) -> None:
    files = make(max_bytes=1 << 20)
    files.open()
    folder = tmp_path / "records"
    line = sealed(record(tenant="x" * 20_000))
    for _ in range(200):
        wall.now += 1
        files.write(line)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1 << 20
    assert sum(path.stat().st_size for path in folder.iterdir()) > 0.7 * (1 << 20)
    assert max(path.stat().st_size for path in folder.iterdir()) <= (1 << 20) // 8
    files.close()


def test_a_record_larger_than_a_file_has_one_of_its_own(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    files = make(max_bytes=1 << 20)
    files.open()
    for letter in "abcd":
        files.write(sealed(record(letter * 40, tenant="x" * 400_000)))
    files.write(sealed(record("e" * 40)))
    folder = tmp_path / "records"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1 << 20
    assert {"d" * 40, "e" * 40} <= set(ids(folder))
    files.close()


def test_what_a_full_disk_took_half_of_is_taken_back(
    make: Callable[..., RecordFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make()
    files.open()
    files.write(sealed(record("a" * 40)))
    write, room = os.write, 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def scarce(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            full()
        taken, room = room, 0
        return write(descriptor, data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(request_records.os, "write", scarce)
        room = 100
        with pytest.raises(OSError, match="No space"):
            files.write(sealed(record("b" * 40)))
        patch.setattr(request_records.os, "ftruncate", full)  # then the half line is the last one of its file
        room = 100
        with pytest.raises(OSError, match="No space"):
            files.write(sealed(record("c" * 40)))
    files.write(sealed(record("d" * 40)))
    files.close()
    found = list(read_records(tmp_path / "records"))
    assert sorted(each.id[0] for each in found if isinstance(each, RecordedRequest)) == ["a", "d"]
    assert [each.reason for each in found if isinstance(each, DamagedLine)] == [
        "is not complete: its output processor ended while it wrote"
    ]


def test_a_file_that_a_cleaner_removed_is_followed_by_another(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    files = make()
    files.open()
    files.write(sealed(record("a" * 40)))
    (path,) = (tmp_path / "records").iterdir()
    path.unlink()
    files.write(sealed(record("b" * 40)))
    assert ids(tmp_path / "records") == ["b" * 40]
    files.close()


def test_a_close_that_fails_ends_the_file(
    make: Callable[..., RecordFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of files says only then that its disk is full. The descriptor is gone, and its number may be another's:
    records were written to that one."""
    files, close = make(), os.close
    files.open()
    files.write(sealed(record("a" * 40)))

    def fails(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(request_records.os, "close", fails)
        with pytest.raises(OSError, match="quota"):
            files.close()
    other = (tmp_path / "other").open("wb")  # gets the number
    files.write(sealed(record("b" * 40)))
    other.close()
    assert (tmp_path / "other").stat().st_size == 0
    assert sorted(ids(tmp_path / "records")) == ["a" * 40, "b" * 40]
    files.close()


def test_a_file_that_its_server_has_forgotten_is_followed_by_another(
    make: Callable[..., RecordFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make()
    files.open()
    files.write(sealed(record("a" * 40)))

    def stale(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(request_records.os, "fstat", stale)
        files.write(sealed(record("b" * 40)))
    assert sorted(ids(tmp_path / "records")) == ["a" * 40, "b" * 40]
    files.close()


def test_a_process_that_is_killed_at_its_start_leaves_no_file(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    make().open()
    assert list((tmp_path / "records").iterdir()) == []


def test_processes_that_share_a_folder_have_their_own_files(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    one, other = make(epoch=1), make(epoch=2)
    for files in (one, other):
        files.open()
    one.write(sealed(record("a" * 40)))
    other.write(sealed(record("b" * 40)))
    one.close()
    assert sorted(ids(tmp_path / "records")) == ["a" * 40, "b" * 40]
    other.close()


def test_a_process_without_requests_leaves_no_file(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    files = make()
    files.open()
    files.close()
    files.close()
    assert list((tmp_path / "records").iterdir()) == []


def test_a_folder_that_is_none_is_refused(make: Callable[..., RecordFiles], tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        make().open()


def test_fields_of_default_take_no_room() -> None:
    assert set(msgspec.json.decode(sealed(record()).partition(b" ")[2])["outputs"][0]) == {
        *("index", "token_ids", "finish_reason", "logprobs"),
    }


@pytest.mark.parametrize(
    ("numerics", "kv_layout", "exact"),
    [
        ("cpu/float32/flash/torch-2.13.0", "HND/fp32/4x2x64/16", True),
        ("cpu/float32/flash/torch-2.13.0", "HND/int8+fp32/4x2x64/16", False),
        ("cuda/H200/float32/triton/torch-2.13.0", "HND/fp8-e4m3/4x2x64/16", False),
        ("cpu/bfloat16/flash/torch-2.13.0", "HND/bf16/4x2x64/16", False),
        ("cpu/bfloat16/tokenwise/torch-2.13.0", "HND/int8+fp32/4x2x64/16", True),
        ("cpu/float32/int8-dynamic/flash/by-row/torch-2.13.0", "HND/fp32/4x2x64/16", False),
        ("hash", "hash/16", True),
        ("vllm/0.11", "", False),
        ("", "", False),
    ],
)
def test_which_engines_compute_the_same_tokens_again(numerics: str, kv_layout: str, exact: bool) -> None:
    assert repeats_exactly(numerics, kv_layout) == exact


@pytest.mark.parametrize(("threads", "found"), [((2, 2), 2), ((2, 1), 0), ((0, 0), 0), ((), 0)])
def test_the_number_of_threads_is_that_of_all_engines(threads: tuple[int, ...], found: int) -> None:
    legs = [RecordedLeg(engine="e", kind="whole", num_threads=each) for each in threads]
    output = RecordedOutput(index=0, token_ids=[7], finish_reason="length", legs=legs)
    again = unsealed(sealed(record(outputs=[output])))
    assert again.num_threads == found
