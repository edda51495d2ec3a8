import os
from pathlib import Path
from typing import Literal

from tokenloom.engine_core.data.config import EngineConfig, KVConfig, ParallelConfig
from tokenloom.services.engine.records.identity import Identity, location_of, supervisor_of
from tokenloom.v1 import types_pb2


def test_a_store_is_known_by_its_place(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.write_text("one")
    folder = tmp_path / "kv"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    known = location_of(folder.as_uri(), boot)
    assert location_of((tmp_path / "link").as_uri(), boot) == known
    folder.rmdir()
    folder.mkdir()
    assert location_of(folder.as_uri(), boot) == known, "engines make a folder again that was removed"
    assert location_of((tmp_path / "other").as_uri(), boot) != known
    boot.write_text("another host")
    assert location_of(folder.as_uri(), boot) != known
    assert location_of("lm://10.0.0.7:65432", boot) == location_of("lm://10.0.0.7:65432/", tmp_path / "none")
    assert location_of("lm://10.0.0.7:65432") != location_of("lm://10.0.0.8:65432")


def test_a_server_at_a_loopback_address_is_one_of_this_host(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    for host in ("localhost", "127.0.0.1", "[::1]"):
        boot.write_text("one")
        known = location_of(f"lm://{host}:65432", boot)
        assert os.readlink("/proc/self/ns/net") in known, "pods of a host have each their own"
        boot.write_text("another host")
        assert location_of(f"lm://{host}:65432", boot) != known


def test_folders_that_containers_have_at_one_path_are_told_apart(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"

    def seen(path: str, *mounts: str) -> str:
        lines = ["27 1 254:0 / / rw - ext4 /dev/vda rw", *(f"30 27 {mount} rw - ext4 /dev/vda rw" for mount in mounts)]
        table.write_text("".join(f"{line}\n" for line in lines))
        return location_of(f"file://{path}", tmp_path / "none", table)

    one = seen("/kv/blocks", "254:0 /pods/1/kv /kv")
    assert one == "254:0:/pods/1/kv/blocks"
    assert seen("/kv/blocks", "254:0 /pods/2/kv /kv") != one
    assert seen("/kv/blocks", "254:1 /pods/1/kv /kv") != one
    assert seen("/shared/blocks", "254:0 /pods/1/kv /shared") == one, "one folder at two paths"
    assert seen("/kv/blocks", "254:1 /other /kv", "254:0 /pods/1/kv /kv") == one, "the later mount hides the earlier"
    assert seen("/kvs", "254:0 /pods/1/kv /kv") == "254:0:/kvs"
    assert seen("/my%20kv", "254:0 /pods/1 /my\\040kv") == "254:0:/pods/1"
    assert location_of("file:///kv", tmp_path / "none", tmp_path / "none") == "/kv"


def test_where_ray_places_the_core_only_a_server_is_known_to_be_shared() -> None:
    def shared(store: str, backend: Literal["mp", "ray"]) -> bytes:
        kv = KVConfig(store=store, store_bytes=1 if store.startswith("file") else 0)
        engine = EngineConfig(kv=kv, parallel=ParallelConfig(data_parallel_backend=backend))
        identity = Identity.__new__(Identity)
        identity.fingerprint, identity._engine = types_pb2.Fingerprint(), engine
        return identity.kv_store

    for store in ("file:///kv", "lm://localhost:65432"):
        assert shared(store, "mp")
        assert not shared(store, "ray")
    assert shared("lm://10.0.0.7:65432", "ray") == shared("lm://10.0.0.7:65432", "mp") != b""


def test_supervisors_of_one_host_name_and_path_differ_by_directory_and_boot(tmp_path: Path) -> None:
    first, boot = tmp_path / "first" / "engine-0.json", tmp_path / "boot"
    second = tmp_path / "second" / "engine-0.json"
    for path in (first, second):
        path.parent.mkdir()
    boot.write_text("one")
    assert supervisor_of(first, boot) == supervisor_of(first, boot)
    seen = {supervisor_of(first, boot)}
    boot.write_text("another host with this name")
    seen.add(supervisor_of(first, boot))
    # What a second container has at the same path.
    first.parent.rename(tmp_path / "elsewhere")
    second.parent.rename(first.parent)
    seen.add(supervisor_of(first, boot))
    assert len(seen) == 3
    assert supervisor_of(first, tmp_path / "none").endswith("engine-0.json")
