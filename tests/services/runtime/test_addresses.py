"""Parsing addresses, and which of them a service may listen on."""

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime import addresses


@pytest.mark.parametrize(
    ("text", "shown", "local"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", True),
        ("localhost:0", "localhost:0", True),
        ("[::1]:5", "[::1]:5", True),
        ("unix:/a/b", "unix:/a/b", True),
        ("unix:///a/b", "unix:/a/b", True),
        ("0.0.0.0:1", "0.0.0.0:1", False),
        ("[::]:1", "[::]:1", False),
        ("10.1.2.3:1", "10.1.2.3:1", False),
        ("example.org:65535", "example.org:65535", False),
    ],
)
def test_parse(text: str, shown: str, local: bool) -> None:
    address = addresses.parse(text)
    assert str(address) == shown
    assert address.is_local is local


@pytest.mark.parametrize("text", ["", "80", ":80", "host", "host:", "host:x", "host:65536", "host:-1", "unix:"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        addresses.parse(text, field="listen")
    assert caught.value.field == "listen"


def test_unix_paths_have_a_limit() -> None:
    addresses.parse("unix:" + "x" * addresses.MAX_UNIX_PATH)
    with pytest.raises(InvalidArgument):
        addresses.parse("unix:" + "x" * (addresses.MAX_UNIX_PATH + 1))


def test_open_ports_need_a_word() -> None:
    addresses.check_closed(addresses.parse("127.0.0.1:1"), insecure=False)
    addresses.check_closed(addresses.parse("0.0.0.0:1"), insecure=True)
    with pytest.raises(InvalidArgument, match="--insecure"):
        addresses.check_closed(addresses.parse("0.0.0.0:1"), insecure=False)
