"""Where a data-parallel group meets."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data_parallel.group_address import (
    Meeting,
    check_address,
    connect,
    listen,
    meeting_of,
    worker_host,
)


@pytest.mark.parametrize("address", ["unix:/run/group.sock", "127.0.0.1:7000", "localhost:7000", "::1:7000"])
def test_addresses_of_this_host_are_taken(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("address", "error"),
    [("10.77.0.1:7000", "name a data_parallel_secret_file"), ("group.sock", "use unix:/path or host:port")],
)
def test_others_are_refused_by_name(address: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_address(address)


def test_other_hosts_are_reached_with_a_secret() -> None:
    check_address("10.77.0.1:7000", has_secret=True)


def test_the_socket_of_a_hub_that_runs_is_not_replaced(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/group"
    with listen(address):
        with pytest.raises(OSError, match="a process listens there"):
            listen(address)
        connect(address).close()


def test_a_socket_that_an_earlier_process_left_is_replaced(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/group"
    listen(address).close()
    with listen(address), connect(address):
        assert (socket_dir / "group").stat().st_mode & 0o777 == 0o600


def test_workers_are_reached_at_an_address_that_names_their_host() -> None:
    assert worker_host("unix:/group.sock") == worker_host("127.0.0.1:7") == "127.0.0.1"
    with pytest.raises(ValueError, match="at which the other ranks reach rank 0"):
        worker_host("0.0.0.0:7")


def test_clients_of_one_machine_choose_one_meeting_for_the_cores_that_ray_places(socket_dir: Path) -> None:
    config = ParallelConfig(data_parallel_address=f"unix:{socket_dir}/group")
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: meeting_of(config, "127.0.0.1"), range(8)))
    (meeting,) = found
    assert len(meeting.secret) == 32
    with listen(meeting.address), connect(meeting.address):
        assert meeting_of(config, "127.0.0.1") == meeting, "also after rank 0 was lost"
    (written,) = socket_dir.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600


def test_an_address_that_is_named_is_the_meeting(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 16)
    named = ParallelConfig(data_parallel_address="10.77.0.1:7000", data_parallel_secret_file=str(secret))
    assert meeting_of(named, "10.77.0.2") == Meeting("10.77.0.1:7000", b"s" * 16)
    with pytest.raises(ValueError, match="name a data_parallel_secret_file"):
        meeting_of(ParallelConfig(data_parallel_address="10.77.0.1:7000"), "10.77.0.2")
