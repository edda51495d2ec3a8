import sys

import pytest

from tokenloom.gpu_worker.kv_connector import kv_transports, nixl


def names(*wanted: str) -> list[str]:
    transports = kv_transports.make_transports(wanted)
    found = [transport.name for transport in transports]
    for transport in transports:
        transport.close()
    return found


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["auto"], ["shm", "socket"]),
        (["socket"], ["socket"]),
        (["socket", "auto"], ["socket", "shm"]),
        (["shm", "shm"], ["shm"]),
        ([], []),
    ],
)
def test_order_is_as_named_and_auto_is_what_works(
    wanted: list[str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "is_available", lambda: False)
    assert names(*wanted) == found


def test_a_device_has_a_way_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "is_available", lambda: True)
    assert kv_transports.expanded(["auto"], on_host=False) == ["cuda", "shm", "socket"]
    assert kv_transports.expanded(["auto"]) == ["shm", "nixl", "socket"]


@pytest.mark.skipif(not nixl.is_available(), reason="nixl is not installed")
def test_auto_prefers_nixl_to_sockets() -> None:
    assert names("auto") == ["shm", "nixl", "socket"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda, shm, nixl, socket, not 'carrier pigeon'"):
        names("carrier pigeon")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)  # its import fails now, as where it is not installed
    with pytest.raises(ValueError, match=r"tokenloom\[nixl\]"):
        names("nixl")
