"""Moves blocks over stream sockets: TCP across hosts, with TLS if it leaves this host, or a unix socket.

A reader opens a connection, shows the endpoint's token, and asks for batches of blocks; the owner's kernel gathers the
pieces out of its pool and the reader's scatters them into its own. A batch travels region by region, so that blocks
that follow each other travel as one piece. The blocks of a device go through pinned memory on that side.
"""

import contextlib
import functools
import hmac
import itertools
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tokenloom.engine_core.kv_transfer.kv_transport import (
    BlockIds,
    Bytes,
    IntArray,
    KVPool,
    KVReader,
    KVTransferError,
    PartsEndpoint,
    checked_pairs,
)

from .listener import KVListener, hang_up
from .socket_frames import decoded, pieces, receive_frame, receive_into, send, send_frame
from .staging import StagedPart, Staging, Stagings

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0
"""After this long without a byte the peer or the network counts as stuck."""
_BUFFER_BYTES = 4 << 20
_BATCH_BYTES = 64 << 20
"""How many blocks are requested at once. It bounds how long other connections wait for this one's threads."""
_MAX_CONNECTIONS = 64
"""Readers times the concurrent loads of each. Each costs a thread, which sleeps in the kernel."""


@dataclass(frozen=True)
class TLS:
    """Makes TLS contexts of both directions from the mesh's certificates; each side proves its identity."""

    server: ssl.SSLContext
    """For all connections of a listener; it follows the certificate when that changes."""
    client: Callable[[], ssl.SSLContext]
    """Called for each connection that is opened."""
    peer_name: str = ""
    """The name that the other side's certificate must bear; empty: the host connected to, and any client."""


class _Endpoint(msgspec.Struct, array_like=True):
    address: str
    """``host:port``, or ``unix:@name`` of an abstract unix socket, which leaves no file behind."""
    token: bytes
    """Readers show it, because other processes may find the address."""


class _Hello(msgspec.Struct, array_like=True):
    token: bytes
    layout: str
    regions: list[tuple[int, int]] = []
    """Which regions the reader wants: the first of each range and the one behind it, ascending; empty: all."""


class _Welcome(msgspec.Struct, array_like=True):
    layout: str
    num_blocks: int
    block_bytes: list[int]
    """The size of a block, or of a slot, in each region."""
    num_slots: int = 0


class _Batch(msgspec.Struct, array_like=True):
    block_ids: bytes
    """Little-endian uint32. The answer is their bytes; a batch with an invalid block ends the connection."""


class SocketTransport:
    """Fulfils :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` for every pool."""

    name = "socket"
    serves_on_demand = False

    def __init__(self, listen: str = "", advertise: str = "", tls: TLS | None = None) -> None:
        """Args:
            listen: ``host:port`` (port 0: any); empty: a unix socket, for readers on this host.
            advertise: The host that readers connect to, if it differs from the one listened on.
            tls: Required if readers are on other hosts.

        Raises ``ValueError`` if ``listen`` would expose the pool to the network without TLS.
        """
        if listen and tls is None and not _is_loopback(listen.rpartition(":")[0]):
            raise ValueError(f"KV blocks leave this host only under TLS; listen on loopback, not on {listen}")
        self._listen = listen
        self._advertise = advertise
        self._tls = tls
        self.guards_bytes = tls is not None
        self._listener: KVListener | None = None
        self._readers: set[SocketReader] = set()
        self._lock = threading.Lock()

    def serve(self, pool: KVPool) -> bytes:
        assert self._listener is None, "a transport serves one pool"
        server, address = self._bind()
        owner = _Owner(pool, secrets.token_bytes(16), self._tls.peer_name if self._tls else "")
        self._listener = KVListener(
            server,
            owner.serve,
            name="kv-socket",
            max_connections=_MAX_CONNECTIONS,
            tls=self._tls.server if self._tls and self._listen else None,
        )
        return msgspec.msgpack.encode(_Endpoint(address, owner.token))

    def attend(self, seconds: float) -> None:
        """Do nothing: a thread serves each connection."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        return self.open_regions(endpoint, layout, [])

    def open_regions(self, endpoint: bytes, layout: str, ranges: Sequence[range]) -> KVReader:
        """As :class:`tokenloom.engine_core.kv_transfer.pool_parts.PartTransport` says; without ranges all regions."""
        readers: list[SocketReader] = []
        try:
            for where, its_layout, own in _owners(endpoint, layout):
                wanted = [(each.start - own.start, each.stop - own.start) for each in ranges if each.start in own]
                if wanted or not ranges:
                    readers.append(self._reader(_Hello(where.token, its_layout, wanted), where.address))
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        return readers[0] if len(readers) == 1 else PartsReader(readers)

    def _reader(self, hello: _Hello, address: str) -> "SocketReader":
        reader = SocketReader(address, hello, self._tls, self._forget)
        with self._lock:
            self._readers.add(reader)
        return reader

    def _forget(self, reader: "SocketReader") -> None:
        with self._lock:
            self._readers.discard(reader)

    def close(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()
        if self._listener is not None:
            self._listener.close()

    def _bind(self) -> tuple[socket.socket, str]:
        if not self._listen:
            name = f"tokenloom-kv-{secrets.token_hex(8)}"
            server = socket.socket(socket.AF_UNIX)
            server.bind(f"\0{name}")
            return server, f"unix:@{name}"
        host, _, port = self._listen.rpartition(":")
        host = host.strip("[]")
        server = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return server, f"{self._advertise or host}:{server.getsockname()[1]}"


_MOST_REGIONS = 1 << 20
"""More than any pool has."""


def _owners(endpoint: bytes, layout: str) -> list[tuple[_Endpoint, str, range]]:
    """Return who serves the parts of a pool: where, the layout of the part, and which regions of the pool it has.

    Raises :class:`KVTransferError` (``transport``).
    """
    try:
        parts = decoded(endpoint, PartsEndpoint).parts
    except msgspec.DecodeError:
        parts = [(endpoint, layout, _MOST_REGIONS)]
    found, begin = [], 0
    try:
        for each, its_layout, count in parts:
            found.append((decoded(each, _Endpoint), its_layout, range(begin, begin + count)))
            begin += count
    except msgspec.DecodeError as error:
        raise KVTransferError("transport", f"the owner's endpoint: {error}") from error
    # A layout names its parts in order: another one's bytes would be read as plausible KV.
    if "+".join(its_layout for _, its_layout, _ in found) != layout:
        raise KVTransferError("layout", f"the owner's parts are not those of {layout}")
    return found


class _Owner:
    """Serves one pool to :class:`SocketReader`."""

    def __init__(self, pool: KVPool, token: bytes, peer_name: str) -> None:
        self.token = token
        self._peer_name = peer_name
        self._pool = pool

    def serve(self, connection: socket.socket) -> None:
        """Answer one reader until it hangs up or sends an invalid request."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with contextlib.suppress(msgspec.DecodeError, KVTransferError):
            hello = receive_frame(connection, _Hello)
            if not hmac.compare_digest(hello.token, self.token) or not _is_named(connection, self._peer_name):
                return
            pool = _with_regions(self._pool, hello.regions)
            # Also sent to a reader with another layout, so that its error can name both layouts. It then gets no block.
            send_frame(connection, _Welcome(pool.layout, pool.num_blocks, pool.region_bytes, pool.num_slots))
            staging = None
            if hello.layout == pool.layout and pool.device is not None:
                staging = Staging(pool, pool.device)
            while hello.layout == pool.layout:
                self._answer(connection, pool, staging)

    def _answer(self, connection: socket.socket, pool: KVPool, staging: Staging | None) -> None:
        connection.settimeout(None)  # an idle reader keeps its connection; one that is gone is found by keepalive
        batch = receive_frame(connection, _Batch)
        connection.settimeout(_READ_SECONDS)
        if len(batch.block_ids) % 4:
            raise KVTransferError("transport", "a torn list of blocks")
        block_ids = pool.checked(np.frombuffer(batch.block_ids, dtype="<u4"))
        if staging is None:
            send(connection, pieces(pool, block_ids))
        else:
            staging.send(block_ids, lambda packed: send(connection, [packed.data]))


def _with_regions(pool: KVPool, ranges: Sequence[tuple[int, int]]) -> KVPool:
    """Return a pool with these of its regions. Raises :class:`KVTransferError` for what no reader of ours asks."""
    if not ranges:
        return pool
    bounds = [bound for each in ranges for bound in each]
    is_ascending = all(one <= other for one, other in itertools.pairwise([0, *bounds, len(pool.regions)]))
    if not is_ascending or pool.device is not None:
        raise KVTransferError("transport", f"no such regions: {len(ranges)} ranges")
    return replace(pool, regions=tuple(region for begin, end in ranges for region in pool.regions[begin:end]))


class PartsReader:
    """Reads the parts of a pool from the workers that serve them, one after the other."""

    def __init__(self, readers: Sequence["SocketReader"]) -> None:
        """``readers``: in order of the regions."""
        self._readers = readers

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        ends = list(itertools.accumulate(len(reader.region_bytes) for reader in self._readers))
        if ends[-1:] != [len(pool.regions)] or pool.device is not None:
            raise KVTransferError("layout", f"the owner's parts have {ends[-1:]} regions, not {len(pool.regions)}")
        for reader, end in zip(self._readers, ends, strict=True):
            regions = pool.regions[end - len(reader.region_bytes) : end]
            reader.read(source_block_ids, target_block_ids, replace(pool, regions=regions))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class SocketReader:
    """Holds connections to one owner, as many as there are concurrent reads, and reuses them."""

    def __init__(
        self, address: str, hello: _Hello, tls: TLS | None, on_close: Callable[["SocketReader"], None]
    ) -> None:
        """Connect. Raises :class:`KVTransferError`.

        Attributes:
            region_bytes: The size of a block, or of a slot, in each region that is read.
        """
        self._address = address
        self._hello = hello
        self._tls = tls
        self._on_close = on_close
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._stagings = Stagings()
        connection, self._welcome = self._connect()
        self.region_bytes = self._welcome.block_bytes
        self._idle.append(connection)

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        if self._welcome.block_bytes != pool.region_bytes:
            raise KVTransferError("layout", "the owner's regions are of other sizes than this pool's")
        theirs = self._welcome
        checked_pairs(source_block_ids, theirs.num_blocks, target_block_ids, pool, theirs.num_slots)
        source, target = np.asarray(source_block_ids), np.asarray(target_block_ids)
        per_batch = max(1, _BATCH_BYTES // max(1, pool.block_bytes))
        connection = self._take()
        try:
            for begin in range(0, len(source), per_batch):
                batch = slice(begin, begin + per_batch)
                send_frame(connection, _Batch(source[batch].astype("<u4").tobytes()))
                self._receive(connection, pool, target[batch])
        except OSError as error:
            self._drop(connection)
            raise KVTransferError("transport", f"reading blocks from {self._address}: {error}") from error
        except BaseException:
            self._drop(connection)  # an answer may be half read
            raise
        self._give_back(connection)

    def _receive(self, connection: socket.socket, pool: KVPool, target: IntArray) -> None:
        if pool.device is None:
            receive_into(connection, pieces(pool, target))
            return
        take = functools.partial(_fill, connection)
        self._stagings.receive(pool, pool.device, target, take)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._all:
                # Closing alone would not wake a thread that waits in recv for this socket; the thread closes it after
                # that.
                hang_up(connection)
        for connection in idle:
            self._drop(connection)
        self._on_close(self)

    def _take(self) -> socket.socket:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        return connection or self._connect()[0]

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def _connect(self) -> tuple[socket.socket, _Welcome]:
        connection: socket.socket | None = None
        try:
            connection = _dial(self._address, self._tls)
            with self._lock:
                if self._closed:
                    raise OSError("the reader is closed")
                self._all.add(connection)
            send_frame(connection, self._hello)
            welcome = receive_frame(connection, _Welcome)
            if welcome.layout != self._hello.layout:
                raise KVTransferError(
                    "layout", f"the owner's blocks are {welcome.layout}, this engine's {self._hello.layout}"
                )
        except BaseException as error:
            if connection is not None:
                self._drop(connection)
            if isinstance(error, (OSError, ValueError, msgspec.DecodeError)):
                raise KVTransferError("transport", f"connecting to {self._address}: {error}") from error
            raise
        connection.settimeout(_READ_SECONDS)
        return connection, welcome


def _fill(connection: socket.socket, packed: Bytes, part: StagedPart) -> None:
    receive_into(connection, [packed.data])


def _dial(address: str, tls: TLS | None) -> socket.socket:
    if address.startswith("unix:@"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(f"\0{address.removeprefix('unix:@')}")
        except BaseException:
            connection.close()
            raise
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if tls is None or connection.family == socket.AF_UNIX:
        return connection
    return tls.client().wrap_socket(connection, server_hostname=tls.peer_name or address.rpartition(":")[0])


def _is_named(connection: socket.socket, name: str) -> bool:
    """Return whether the peer's certificate names ``name``; true without TLS."""
    if not name or not isinstance(connection, ssl.SSLSocket):
        return True
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    return ("DNS", name) in tuple(names)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")
