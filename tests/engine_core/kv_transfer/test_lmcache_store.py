"""The store on a server of LMCache: what is sent, and what a server that is slow, wrong or gone does.

``recorded_lmcache.json`` is an exchange with the server of lmcache 0.5.6; ``test_lmcache_server.py`` holds it to a real
one where that is installed.
"""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.kv_transfer.lmcache_server import EXIST, GET, PUT, LMCacheServer
from tests.engine_core.kv_transfer.offloading_core import expected, prompt_of
from tests.engine_core.kv_transfer.storing_core import BLOCK_BYTES, BLOCK_SIZE, StoringCore
from tokenloom.engine_core.kv_transfer.block_store import HEAD_BYTES, StoreError, opened, seal
from tokenloom.engine_core.kv_transfer.lmcache_store import LMCacheStore, _asked

RECORDED = Path(__file__).with_name("recorded_lmcache.json")
KEYS = [bytes((index,)) * 32 for index in range(200)]
DATA = bytes(range(256)) * 40
VALUE_BYTES = HEAD_BYTES + len(DATA)
PROMPT = prompt_of(1, 30)


@pytest.fixture
def server() -> Iterator[LMCacheServer]:
    server = LMCacheServer()
    yield server
    server.close()


@pytest.fixture
def store(server: LMCacheServer) -> Iterator[LMCacheStore]:
    store = LMCacheStore("127.0.0.1", server.port, 10.0)
    yield store
    store.close()
    store.close()


def put(store: LMCacheStore, key: bytes, data: bytes = DATA) -> bool:
    return store.write(key, [seal(key, data), data])


def read(store: LMCacheStore, key: bytes) -> bytes | None:
    (value,) = store.read([key], VALUE_BYTES)
    return None if value is None or (data := opened(key, value)) is None else bytes(data)


def test_what_is_put_is_found_and_read(store: LMCacheStore, server: LMCacheServer) -> None:
    assert store.find(KEYS[:3], in_order=True) == set()
    assert put(store, KEYS[0])
    assert put(store, KEYS[2])
    assert not put(store, KEYS[2]), "there is no double work"
    assert store.find(KEYS[:3], in_order=False) == {KEYS[0], KEYS[2]}
    assert [read(store, key) for key in KEYS[:3]] == [DATA, None, DATA]
    assert list(server.values) == [f"tokenloom@1@0@{key.hex()}@uint8".encode() for key in (KEYS[0], KEYS[2])]


def test_many_keys(store: LMCacheStore, server: LMCacheServer) -> None:
    for key in KEYS[:100]:
        put(store, key)
    assert store.find(KEYS, in_order=False) == set(KEYS[:100])
    server.asked.clear()
    assert KEYS[99] in store.find(KEYS, in_order=True)
    assert len(server.asked) == 128, "the search ends in the round with the first key that is missing"
    values = list(store.read(KEYS[:100], VALUE_BYTES))
    assert all(opened(key, value or b"") == DATA for key, value in zip(KEYS, values, strict=False))


def test_a_reader_that_stops_leaves_no_answers_behind(store: LMCacheStore) -> None:
    for key in KEYS[:8]:
        put(store, key)
    values = store.read(KEYS[:8], VALUE_BYTES)
    next(values)
    values.close()
    assert read(store, KEYS[5]) == DATA


def test_a_wrong_value_is_replaced(store: LMCacheStore, server: LMCacheServer) -> None:
    put(store, KEYS[0])
    (name,) = server.values
    server.values[name] = server.values[name][:-1] + b"x"
    assert read(store, KEYS[0]) is None
    store.remove(KEYS[0])
    assert read(store, KEYS[0]) is None
    assert put(store, KEYS[0])
    assert read(store, KEYS[0]) == DATA


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"more"])
def test_a_value_of_another_size_is_wrong_and_is_replaced(store: LMCacheStore, data: bytes) -> None:
    put(store, KEYS[0], data)
    put(store, KEYS[2])
    values = list(store.read(KEYS[:3], VALUE_BYTES))
    assert values[:2] == [b"", None], "the second key has no value at all"
    assert opened(KEYS[2], values[2] or b"") == DATA, "what was asked for ahead is asked for again"
    store.remove(KEYS[0])
    assert list(store.read(KEYS[:1], VALUE_BYTES)) == [b""]
    assert put(store, KEYS[0])
    assert read(store, KEYS[0]) == DATA


def test_what_an_engine_left_that_was_killed_within_a_put(store: LMCacheStore, server: LMCacheServer) -> None:
    kill_within_put(server.port, KEYS[0])
    put(store, KEYS[1])
    assert store.find(KEYS[:3], in_order=True) == set(KEYS[:2]), "the server knows of the name"
    assert not put(store, KEYS[0])
    values = list(store.read(KEYS[:2], VALUE_BYTES))
    assert (values[0], opened(KEYS[1], values[1] or b"")) == (b"", DATA)
    store.remove(KEYS[0])
    assert put(store, KEYS[0])
    assert read(store, KEYS[0]) == DATA


def kill_within_put(port: int, key: bytes) -> None:
    """Send the half of a value, and wait until the server has noticed the end."""
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(_asked(PUT, key, VALUE_BYTES) + DATA[: VALUE_BYTES // 2])
        half.shutdown(socket.SHUT_WR)
        assert not half.recv(1)


def test_what_a_killed_engine_left_keeps_no_other_from_the_store(server: LMCacheServer) -> None:
    cores = [StoringCore(server.url, num_blocks=20) for _ in range(2)]
    num_blocks = (len(PROMPT) - 1) // BLOCK_SIZE
    cores[0].run(PROMPT)
    third = list(server.values)[2]
    server.torn[third] = len(server.values.pop(third))
    assert cores[1].run(PROMPT) == [expected(PROMPT)]
    assert cores[1].num_loaded == 2
    assert not cores[1].connector.queue.is_away, "one block is not the whole store"
    cores[0].core.reset_prefix_cache()
    assert cores[0].run(PROMPT) == [expected(PROMPT)]
    assert cores[0].num_loaded == num_blocks, "the block is whole again"
    for core in cores:
        core.core.shutdown()


def test_a_server_that_is_started_anew(store: LMCacheStore, server: LMCacheServer) -> None:
    put(store, KEYS[0])
    server.hang_up()
    assert read(store, KEYS[0]) == DATA
    port = server.port
    server.close()
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
        read(store, KEYS[0])
    again = LMCacheServer(port)
    assert read(store, KEYS[0]) is None
    again.close()


@pytest.mark.parametrize("sent", [1, HEAD_BYTES, VALUE_BYTES - 1])
def test_a_connection_that_ends_within_a_value(store: LMCacheStore, server: LMCacheServer, sent: int) -> None:
    put(store, KEYS[0])
    server.hangs_up_after = sent
    with pytest.raises(StoreError, match="the server hung up"):
        read(store, KEYS[0])
    assert read(store, KEYS[0]) == DATA


def test_a_silent_server(server: LMCacheServer) -> None:
    server.answers.clear()
    store = LMCacheStore("127.0.0.1", server.port, 0.05)
    with pytest.raises(StoreError, match=r"timed out|no answer within 0\.05 s"):
        store.find(KEYS[:1], in_order=True)
    store.close()


def test_what_is_no_lmcache_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        store = LMCacheStore("127.0.0.1", server.getsockname()[1], 10.0)
        with pytest.raises(StoreError, match="an answer with the code"):
            store.find(KEYS[:1], in_order=True)
        store.close()
        thread.join(30)


def test_the_bytes_are_those_of_a_recorded_exchange() -> None:
    """Each step of the exchange is sent as it was then, and the server's answers of then are understood."""
    steps = msgspec.json.decode(RECORDED.read_bytes(), type=list[tuple[str, str]])
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[tuple[bytes, bytes]] = []

        def play() -> None:
            connection, _ = server.accept()
            with connection:
                for asked, answer in steps:
                    expected_bytes = bytes.fromhex(asked)
                    data = b""
                    while len(data) < len(expected_bytes) and (
                        piece := connection.recv(len(expected_bytes) - len(data))
                    ):
                        data += piece
                    heard.append((data, expected_bytes))
                    connection.sendall(bytes.fromhex(answer))

        thread = threading.Thread(target=play)
        thread.start()
        store = LMCacheStore("127.0.0.1", server.getsockname()[1], 10.0)
        assert converse(store) == (set(), True, {KEYS[0]}, b"block", b"")
        store.close()
        thread.join(30)
    assert [each == wanted for each, wanted in heard] == [True] * len(steps)


def converse(store: LMCacheStore) -> tuple[set[bytes], bool, set[bytes], bytes, bytes | None]:
    """The calls of the recorded exchange."""
    absent = store.find(KEYS[:1], in_order=True)
    is_new = store.write(KEYS[0], [seal(KEYS[0], b"block"), b"block"])
    found = store.find(KEYS[:2], in_order=False)
    (value,) = store.read(KEYS[:1], HEAD_BYTES + 5)
    store.remove(KEYS[0])
    (removed,) = store.read(KEYS[:1], HEAD_BYTES + 5)
    return absent, is_new, found, bytes(opened(KEYS[0], value or b"") or b""), removed  # type: ignore[return-value]


def test_engines_share_blocks_through_it(server: LMCacheServer) -> None:
    cores = [StoringCore(server.url, num_blocks=20) for _ in range(2)]
    num_blocks = (len(PROMPT) - 1) // BLOCK_SIZE
    for core in cores:
        assert core.run(PROMPT) == [expected(PROMPT)]
    stats = cores[1].core.scheduler.stats()
    assert stats.kv_bytes_received == {"lmcache": num_blocks * BLOCK_BYTES}
    server.hangs_up_after = 10
    cores[1].core.reset_prefix_cache()
    assert cores[1].run(PROMPT, settles=False) == [expected(PROMPT)]
    stats = cores[1].core.scheduler.stats()
    assert stats.kv_bytes_received == {"lmcache": 2 * num_blocks * BLOCK_BYTES}, "it is asked again"
    assert not stats.kv_recomputes
    server.close()
    cores[0].core.reset_prefix_cache()
    assert cores[0].run(PROMPT, settles=False) == [expected(PROMPT)], "and so does a server that is gone"
    commands = {command for command, _, _ in server.asked}
    assert {EXIST, GET} <= commands
    for core in cores:
        core.core.shutdown()
