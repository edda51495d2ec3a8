"""Inherited listening sockets."""

import os
import socket
from pathlib import Path

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import Address
from tokenloom.services.runtime.host.held_port import adopt


def address_of(listener: socket.socket) -> Address:
    host, port = listener.getsockname()
    return Address(host=host, port=port)


def test_a_closed_copy_leaves_the_socket_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        descriptor = os.dup(held.fileno())
        os.set_inheritable(descriptor, True)
        with adopt(descriptor, address_of(held), field="listen_fd") as adopted:
            assert adopted.fileno() == descriptor
            assert not adopted.get_inheritable()
            assert not adopted.getblocking()
        with socket.create_connection(held.getsockname()) as client:
            accepted, peer = held.accept()
            accepted.close()
            assert peer == client.getsockname()


def test_a_unix_socket(socket_dir: Path) -> None:
    path = socket_dir / "held"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen()
        adopt(os.dup(held.fileno()), Address(path=str(path)), field="listen_fd").close()


def test_descriptors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        socket.socket() as bound,
        open(tmp_path / "file", "wb") as file,
    ):
        bound.bind(("127.0.0.1", 0))
        address = address_of(held)
        other = Address(host="127.0.0.1", port=address.port % 65535 + 1)
        for descriptor, wanted, reason in (
            (file.fileno(), address, "is not a socket"),
            (10**6, address, "is not open"),
            (10**40, address, "is not open"),
            (bound.fileno(), address_of(bound), "is not a listening stream socket"),
            (held.fileno(), other, f"listens on {address.port}, not on {other}"),
        ):
            with pytest.raises(InvalidArgument, match=reason) as caught:
                adopt(descriptor, wanted, field="listen_fd")
            assert caught.value.field == "listen_fd"
        assert held.getsockname()[1] == address.port  # a refused descriptor stays open
