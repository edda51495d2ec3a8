"""Where a data-parallel group meets."""

from pathlib import Path

import pytest

from tokenloom.engine_core.data_parallel.group_address import check_address, connect, listen, worker_host


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
