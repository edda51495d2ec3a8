import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.gpu_worker.kv_connector.conftest import LAYOUT, SIZES, MakePool, block, blocks
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion, KVTransferError, PartsEndpoint
from tokenloom.gpu_worker.kv_connector.listener import KVListener
from tokenloom.gpu_worker.kv_connector.socket_frames import receive_frame, send_frame
from tokenloom.gpu_worker.kv_connector.tcp_socket import TLS, SocketTransport, _Batch, _Endpoint, _Hello, _Welcome

Make = Callable[..., SocketTransport]

NESTED = b"\x91" * 20_000 + b"\x00"
"""A list within 20,000 lists."""


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def make(*args: object, **kwargs: object) -> SocketTransport:
        made.append(SocketTransport(*args, **kwargs))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def decoded(endpoint: bytes) -> _Endpoint:
    return msgspec.msgpack.decode(endpoint, type=_Endpoint)


def connect(endpoint: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(decoded(endpoint).address.replace("unix:@", "\0"))
    return connection


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:0", "example.org:80", ":0"])
def test_the_network_is_listened_on_under_tls_only(listen: str) -> None:
    with pytest.raises(ValueError, match="TLS"):
        SocketTransport(listen)


def test_the_advertised_host_is_what_readers_connect_to(make: Make, make_pool: MakePool) -> None:
    endpoint = make("127.0.0.1:0", advertise="localhost").serve(make_pool(4))
    host, _, port = decoded(endpoint).address.partition(":")
    assert host == "localhost"
    assert int(port) > 0


def test_a_wrong_token_is_hung_up_on(make: Make, make_pool: MakePool) -> None:
    endpoint = make().serve(make_pool(4))
    with pytest.raises(KVTransferError, match="hung up") as caught:
        make().open(msgspec.msgpack.encode(_Endpoint(decoded(endpoint).address, b"x" * 16)), LAYOUT)
    assert caught.value.reason == "transport"


@pytest.mark.parametrize(
    "hello",
    [
        b"\x92\xc4\x00\xa2\xff\xff",  # a broken text
        b"\x92\xc4\x00",
        b"\xdd\xff\xff\xff\xff",
        b"",
        bytes(100),
        b"\x93\xc4\x00\xa0" + NESTED,
    ],
)
def test_a_hello_that_is_none_ends_its_connection_alone(make: Make, make_pool: MakePool, hello: bytes) -> None:
    """A thread that failed would end the process."""
    endpoint = make().serve(make_pool(4))
    with connect(endpoint) as connection:
        connection.sendall(struct.pack("<I", len(hello)) + hello)
        assert connection.recv(1) == b""
    make().open(endpoint, LAYOUT)


@pytest.mark.parametrize("endpoint", [b"", b"\x92\xa2\xff\xff\xc4\x00", b"\x92\xa1x", b"\x93\xa0\xc4\x00" + NESTED])
def test_an_endpoint_that_is_none_is_refused(make: Make, endpoint: bytes) -> None:
    with pytest.raises(KVTransferError, match="the owner's endpoint") as caught:
        make().open(endpoint, LAYOUT)
    assert caught.value.reason == "transport"


@pytest.mark.parametrize(
    "request_",
    [
        _Batch(struct.pack("<I", 4)),
        _Batch(struct.pack("<I", 2**32 - 1)),
        _Batch(b"123"),
        _Welcome("", 0, []),
    ],
    ids=["out of range", "negative", "torn", "no batch"],
)
def test_the_owner_hangs_up_on_who_asks_for_what_is_not_there(
    make: Make, make_pool: MakePool, request_: msgspec.Struct
) -> None:
    endpoint = make().serve(make_pool(4))
    with connect(endpoint) as connection:
        send_frame(connection, _Hello(decoded(endpoint).token, LAYOUT))
        assert receive_frame(connection, _Welcome) == _Welcome(LAYOUT, 4, list(SIZES))
        send_frame(connection, request_)
        assert connection.recv(1) == b""


def test_a_reader_gets_the_regions_that_it_wants(make: Make, make_pool: MakePool) -> None:
    owner, target = make_pool(4), make_pool(4, seed=1)
    endpoint = make().serve(owner)
    some = replace(target, regions=(*target.regions[1:3], target.regions[4]))
    make().open_regions(endpoint, LAYOUT, [range(1, 3), range(4, 5)]).read([2, 0], [1, 3], some)
    for region, (theirs, ours) in enumerate(zip(owner.views, target.views, strict=True)):
        assert ((ours[[1, 3]] == theirs[[2, 0]]).all()) == (region in (1, 2, 4))


@pytest.mark.parametrize("regions", [[(0, 6)], [(2, 1)], [(-1, 2)], [(1, 3), (2, 4)], [(5, 6)]])
def test_the_owner_hangs_up_on_who_wants_regions_that_are_not_there(
    make: Make, make_pool: MakePool, regions: list[tuple[int, int]]
) -> None:
    endpoint = make().serve(make_pool(4))
    with connect(endpoint) as connection:
        send_frame(connection, _Hello(decoded(endpoint).token, LAYOUT, regions))
        assert connection.recv(1) == b""


def test_parts_are_read_where_each_is_served(make: Make, make_pool: MakePool) -> None:
    owners, target = [make_pool(4, seed=seed) for seed in (1, 2)], make_pool(4)
    parts = [(make().serve(pool), LAYOUT, len(SIZES)) for pool in owners]
    memory = PoolMemory.allocate(2 * target.memory.nbytes, shared=False)
    behind = tuple(KVRegion(each.offset + target.memory.nbytes, each.block_bytes) for each in target.regions)
    both = KVPool(memory, (*target.regions, *behind), 4, "")
    endpoint = msgspec.msgpack.encode(PartsEndpoint(parts))
    make().open(endpoint, f"{LAYOUT}+{LAYOUT}").read([3], [1], both)
    assert block(both, 1) == block(owners[0], 3) + block(owners[1], 3)
    make().open_regions(endpoint, f"{LAYOUT}+{LAYOUT}", [range(5, 10)]).read([2], [0], target)
    assert block(target, 0) == block(owners[1], 2), "only the second one was read"
    with pytest.raises(KVTransferError, match="the owner's parts are not those of"):
        make().open(endpoint, LAYOUT)
    with pytest.raises(KVTransferError, match="the owner's parts have"):
        make().open(endpoint, f"{LAYOUT}+{LAYOUT}").read([0], [0], target)


def test_the_owner_gives_nothing_to_another_layout(make: Make, make_pool: MakePool) -> None:
    endpoint = make().serve(make_pool(4))
    with connect(endpoint) as connection:
        send_frame(connection, _Hello(decoded(endpoint).token, "other"))
        assert receive_frame(connection, _Welcome).layout == LAYOUT
        assert connection.recv(1) == b""


def test_the_owner_hangs_up_on_a_message_that_is_too_long(make: Make, make_pool: MakePool) -> None:
    with connect(make().serve(make_pool(4))) as connection:
        connection.sendall(struct.pack("<I", 1 << 30))
        assert connection.recv(1) == b""


def test_an_owner_that_dies_is_an_error_of_reads_to_come(make: Make, make_pool: MakePool) -> None:
    owner, pool = make(), make_pool(4)
    reader = make().open(owner.serve(make_pool(4, seed=1)), LAYOUT)
    reader.read([1], [1], pool)
    owner.close()
    for _ in range(2):
        with pytest.raises(KVTransferError) as caught:
            reader.read([1], [1], pool)
        assert caught.value.reason == "transport"


def fake_owner(name: str, num_bytes: int, release: threading.Event) -> tuple[KVListener, bytes]:
    """Answers a batch with so many bytes, and hangs up when released."""

    def serve(connection: socket.socket) -> None:
        receive_frame(connection, _Hello)
        send_frame(connection, _Welcome(LAYOUT, 4, list(SIZES)))
        receive_frame(connection, _Batch)
        connection.sendall(bytes(num_bytes))
        release.wait(60)

    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    listener = KVListener(server, serve, name="test", max_connections=4)
    return listener, msgspec.msgpack.encode(_Endpoint(f"unix:@{name}", b""))


def test_a_torn_answer_is_an_error(make: Make, make_pool: MakePool, tmp_path: Path) -> None:
    release = threading.Event()
    release.set()
    owner, endpoint = fake_owner(str(tmp_path), 2 * sum(SIZES) - 1, release)
    with pytest.raises(KVTransferError, match="hung up"):
        make().open(endpoint, LAYOUT).read([0, 1], [0, 1], make_pool(4))
    owner.close()


def test_closing_ends_a_read_that_waits(make: Make, make_pool: MakePool, tmp_path: Path) -> None:
    release, began, pool = threading.Event(), threading.Event(), make_pool(4)
    owner, endpoint = fake_owner(str(tmp_path), 1, release)
    reader = make().open(endpoint, LAYOUT)
    failed = []

    def read() -> None:
        began.set()
        try:
            reader.read([0], [0], pool)
        except KVTransferError as error:
            failed.append(error.reason)

    thread = threading.Thread(target=read)
    thread.start()
    began.wait()
    reader.close()
    thread.join(60)
    assert failed == ["transport"]
    release.set()
    owner.close()


def test_reads_in_batches(make: Make, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.gpu_worker.kv_connector.tcp_socket._BATCH_BYTES", 3 * sum(SIZES))
    owner, pool = make_pool(11), make_pool(11, seed=1)
    make().open(make().serve(owner), LAYOUT).read(range(10, -1, -1), range(11), pool)
    assert blocks(pool) == blocks(owner)[::-1]


def test_a_few_connections_serve_many_reads(make: Make, make_pool: MakePool) -> None:
    reader = make().open(make().serve(make_pool(4)), LAYOUT)
    pool = make_pool(4)
    for _ in range(50):
        reader.read([0, 1], [2, 3], pool)
    assert len(reader._all) == len(reader._idle) == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=engine", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=directory, check=True, capture_output=True,
    )  # fmt: skip
    return directory


def make_tls(certificates: Path, with_client_certificate: bool = True) -> TLS:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    server.load_verify_locations(certificates / "cert.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=str(certificates / "cert.pem"))
    if with_client_certificate:
        client.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return TLS(server, lambda: client)


def test_tls_moves_blocks_and_knows_its_peers(make: Make, make_pool: MakePool, certificates: Path) -> None:
    owner: KVPool = make_pool(9)
    endpoint = make("0.0.0.0:0", advertise="localhost", tls=make_tls(certificates)).serve(owner)
    pool = make_pool(4, seed=1)
    make(tls=make_tls(certificates)).open(endpoint, LAYOUT).read([8, 1, 2], [0, 3, 2], pool)
    assert [block(pool, i) for i in (0, 3, 2)] == [block(owner, i) for i in (8, 1, 2)]
    for stranger in (make(), make(tls=make_tls(certificates, with_client_certificate=False))):
        with pytest.raises(KVTransferError) as caught:
            stranger.open(endpoint, LAYOUT)
        assert caught.value.reason == "transport"
