"""``python -m tests.soak.kv_flips``: a bit flips in each transfer of KV blocks, on a wire, in a file or in a store, and
every answer is right all the same: the blocks are read again, or computed."""

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tests.engine_core.kv_transfer.lmcache_server import LMCacheServer
from tests.engine_core.kv_transfer.offloading_core import BLOCK_BYTES, OffloadingCore
from tests.engine_core.kv_transfer.offloading_core import expected as expected_of
from tests.engine_core.kv_transfer.storing_core import StoringCore
from tests.gpu_worker.kv_connector.engine_pair import Pair
from tests.gpu_worker.kv_connector.test_tcp_socket import make_tls
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.gpu_worker.kv_connector.tcp_socket import TLS, SocketTransport, _Endpoint

_SMALLEST = 100
"""Bytes of a piece that holds blocks; what both sides say before is shorter."""
_RECORD_HEAD = 5
"""Bytes of a TLS record before its body. A flip of its length is found too, after half a minute without a byte."""


@dataclass
class Course:
    """What became of the flips on one road."""

    road: str
    flips: int = 0
    computed: int = 0
    read_again: int = 0
    wrong: int = 0
    transfers: int = 0
    alarms: int = 0

    @property
    def is_good(self) -> bool:
        """Whether each flip was found, and nothing else."""
        return self.flips == self.computed + self.read_again and not self.wrong and not self.alarms

    def __str__(self) -> str:
        found = f"{self.computed} | {self.read_again}"
        return f"| {self.road} | {self.flips} | {found} | {self.wrong} | {self.transfers} | {self.alarms} |"


class Road(Protocol):
    """A way on which blocks come back or move."""

    name: str

    def is_right(self, chance: random.Random, *, flips: bool) -> bool:
        """Move the blocks of a new prompt, of which one bit flips; return whether its answer is right."""

    @property
    def signs(self) -> tuple[int, int]:
        """How often blocks were computed, and how often they were read again, so far."""

    def close(self) -> None:
        """End all that was started."""


class FlippingProxy:
    """Stands between a reader and an owner, and flips a bit of the next piece that the owner sends."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.chance: random.Random | None = None
        """Chooses the bit; None: none flips."""
        self._threads[0].start()

    def close(self) -> None:
        """Wait for the ends of the connections, which the transports of both sides have closed."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._server.accept()
                self.num_connections += 1
                thread = threading.Thread(target=self._serve, args=(reader,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, reader: socket.socket) -> None:
        with reader, socket.create_connection(self._upstream) as owner:
            asking = threading.Thread(target=self._pass, args=(reader, owner, False), daemon=True)
            asking.start()
            self._pass(owner, reader, True)
            asking.join(30)

    def _pass(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if flips and len(data) >= _SMALLEST and self.chance is not None:
                    chance, self.chance = self.chance, None
                    data[chance.randrange(_RECORD_HEAD, len(data))] ^= 1 << chance.randrange(8)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class ProxiedTransport(SocketTransport):
    """Serves a pool behind a proxy."""

    proxy: FlippingProxy | None = None

    def serve(self, pool: KVPool) -> bytes:
        where = msgspec.msgpack.decode(super().serve(pool), type=_Endpoint)
        self.proxy = FlippingProxy(where.address)
        return msgspec.msgpack.encode(_Endpoint(self.proxy.address, where.token))

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


class Wire:
    """Two engines over TCP, which compare what they do by default."""

    def __init__(self, name: str, tls: TLS | None = None, *, checksum: bool | None = None) -> None:
        self.name = name
        self._owner = ProxiedTransport("127.0.0.1:0", tls=tls)
        transports = iter([self._owner, SocketTransport(tls=tls)])
        self._pair = Pair(lambda: [next(transports)], worker="hash", checksum=checksum, num_blocks=512)
        self._number = 0

    def is_right(self, chance: random.Random, *, flips: bool) -> bool:
        self._number += 1
        vocab_size = self._pair.decode.core.ready.vocab_size
        prompt = [chance.randrange(vocab_size) for _ in range(200)]
        proxy = self._owner.proxy
        assert proxy is not None
        if flips:
            proxy.chance = chance
        tokens = self._pair.ask(str(self._number), prompt, CoreSamplingParams(max_tokens=5, seed=0, temperature=0.0))
        assert proxy.chance is None, "no piece was large enough"
        return tokens == expected_tokens(prompt, 5, vocab_size)

    @property
    def signs(self) -> tuple[int, int]:
        assert self._owner.proxy is not None
        stats = self._pair.decode.core.scheduler.stats()
        return sum(stats.kv_recomputes.values()), max(0, self._owner.proxy.num_connections - 1)

    def close(self) -> None:
        self._pair.close()


class File:
    """An engine whose evicted blocks go to a file."""

    name = "offload file"

    def __init__(self, folder: Path) -> None:
        self._core = OffloadingCore(folder, num_blocks=10)

    def is_right(self, chance: random.Random, *, flips: bool) -> bool:
        first, *others = ([chance.randrange(50) for _ in range(30)] for _ in range(3))
        for prompt in (first, *others):
            self._core.run(prompt, max_tokens=1)
        self._core.settle()
        before = self._core.blocks_loaded
        if flips:
            self._flip(chance)
        is_right = self._core.run(first, max_tokens=1) == [expected_of(first, 1)]
        assert flips or self._core.blocks_loaded > before, "nothing came from the file"
        return is_right

    def _flip(self, chance: random.Random) -> None:
        """Flip a bit of each block: the first that is read is found, and the others are not read."""
        connector: Any = self._core.core._connector
        file = connector._tier._file.fileno()
        for begin in range(0, os.fstat(file).st_size, BLOCK_BYTES):
            at = begin + chance.randrange(BLOCK_BYTES)
            os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1 << chance.randrange(8)]), at)

    @property
    def signs(self) -> tuple[int, int]:
        return sum(self._core.core.scheduler.stats().kv_recomputes.values()), 0

    def close(self) -> None:
        self._core.core.shutdown()


@dataclass
class Store:
    """Two engines that share a folder, or a server of LMCache."""

    name: str
    url: str
    folder: Path | None = None
    server: LMCacheServer | None = None
    cores: list[StoringCore] = field(init=False)

    def __post_init__(self) -> None:
        size = 64 << 20 if self.folder is not None else 0
        self.cores = [StoringCore(self.url, store_bytes=size, num_blocks=64) for _ in range(2)]

    def is_right(self, chance: random.Random, *, flips: bool) -> bool:
        writer, reader = self.cores
        known, prompt = set(self._names()), [chance.randrange(50) for _ in range(30)]
        writer.run(prompt, max_tokens=1)
        if flips:
            self._flip(chance.choice(sorted(set(self._names()) - known)), chance)
        before = reader.num_loaded
        is_right = reader.run(prompt, max_tokens=1) == [expected_of(prompt, 1)]
        assert flips or reader.num_loaded > before, "nothing came from the store"
        return is_right

    def _names(self) -> list[Any]:
        return list(self.folder.glob("*.kv")) if self.folder is not None else list(self._values)

    @property
    def _values(self) -> dict[bytes, bytes]:
        assert self.server is not None
        return self.server.values

    def _flip(self, name: Any, chance: random.Random) -> None:
        data = bytearray(self._values[name] if self.folder is None else name.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if self.folder is None:
            self._values[name] = bytes(data)
        else:
            name.write_bytes(data)

    @property
    def signs(self) -> tuple[int, int]:
        return sum(self.cores[1].core.scheduler.stats().kv_recomputes.values()), 0

    def close(self) -> None:
        for core in self.cores:
            core.core.shutdown()
        if self.server is not None:
            self.server.close()


def make_certificate(folder: Path) -> None:
    """Write a certificate for localhost, and its key."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=engine"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)


def roads(folder: Path) -> Iterator[Road]:
    """Yield the roads, each to be closed before the next one."""
    yield Wire("TCP")
    make_certificate(folder)
    yield Wire("TCP with TLS", make_tls(folder))
    yield File(folder)
    (shared := folder / "store").mkdir()
    yield Store("shared folder", shared.as_uri(), folder=shared)
    server = LMCacheServer()
    yield Store("LMCache server", server.url, server=server)


def run(flips: int, transfers: int, seed: int) -> Iterator[Course]:
    """Yield what became of so many flips on each road, and of transfers without one."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for road in roads(Path(folder)):
            course = Course(road.name)
            try:
                for flip in chance.sample([True] * flips + [False] * transfers, flips + transfers):
                    before = road.signs
                    course.wrong += not road.is_right(chance, flips=flip)
                    computed, again = (now - then for now, then in zip(road.signs, before, strict=True))
                    if flip:
                        course.flips += 1
                        course.computed += bool(computed)
                        course.read_again += bool(again) and not computed
                    else:
                        course.transfers += 1
                        course.alarms += bool(computed or again)
            finally:
                road.close()
            yield course


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000, help="on each road")
    parser.add_argument("--transfers", type=int, default=1000, help="on each road, without a flip")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    print("| road | flips | computed again | read again | wrong answers | other transfers | false alarms |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    is_good = True
    for course in run(flags.flips, flags.transfers, flags.seed):
        print(course, flush=True)
        is_good &= course.is_good
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
