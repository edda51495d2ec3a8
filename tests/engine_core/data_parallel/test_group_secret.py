"""Ranks and the hub of a group prove that they know its secret."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_core.data_parallel.cores import free_port
from tokenloom.engine_core.data_parallel.group_address import connect, read_secret
from tokenloom.engine_core.data_parallel.group_hub import GroupHub
from tokenloom.engine_core.data_parallel.group_link import GroupLink
from tokenloom.engine_core.data_parallel.messages import (
    Challenge,
    Frames,
    GroupHello,
    Proof,
    Refused,
    ToRank,
    Welcome,
    decoder_of,
)

SECRET, OTHER = b"a secret of the group", b"another secret, as long"


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def hub(address: str) -> Iterator[GroupHub]:
    hub = GroupHub(address, GroupHello("experts", 0, {}), 2, SECRET)
    yield hub
    hub.close()


def join(address: str, secret: bytes) -> GroupLink:
    return GroupLink(address, GroupHello("experts", 1, {}), 2, timeout=30, secret=secret)


def test_ranks_with_the_secret_meet(address: str) -> None:
    welcomes: list[Welcome] = []
    first = GroupLink(address, GroupHello("experts", 0, {}), 2, timeout=30, secret=SECRET)
    second = join(address, SECRET)
    for link in (first, second):
        message = link._frames.receive()
        assert isinstance(message, Welcome)
        welcomes.append(message)
    assert welcomes[0] == welcomes[1]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("secret", "error"), [(OTHER, "the secret of rank 0 is another one"), (b"", "this rank has none")]
)
def test_a_rank_without_the_secret_is_not_let_in(hub: GroupHub, address: str, secret: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        join(address, secret)


def test_a_rank_with_a_secret_joins_no_hub_without_one(address: str) -> None:
    hub = GroupHub(address, GroupHello("experts", 0, {}), 2)
    with pytest.raises(ValueError, match="rank 0 has none"):
        join(address, SECRET)
    hub.close()


def test_a_hub_takes_no_proof_that_was_recorded(hub: GroupHub, address: str) -> None:
    def say_hello(proof: bytes) -> ToRank:
        frames: Frames[ToRank] = Frames(connect(address), decoder_of(ToRank))
        frames.send(GroupHello("experts", 1, {}, b"nonce"))
        challenge = frames.receive()
        assert isinstance(challenge, Challenge)
        frames.send(Proof(proof or challenge.proof))
        answer = frames.receive()
        frames.close()
        return answer

    for proof in (b"", bytes(32)):  # the hub's own proof, and any other
        refused = say_hello(proof)
        assert isinstance(refused, Refused)
        assert refused.permanent
        assert "secret of the group is another one" in refused.reason


@pytest.mark.parametrize(("content", "error"), [(b"short\n", "holds 5 bytes; at least 16"), (None, "No such file")])
def test_files_that_hold_no_secret(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=error):
        read_secret(str(path))


def test_a_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert read_secret(str(path)) == SECRET
    assert read_secret("") == b""
