"""KV sockets of a core's process whose certificates are replaced while it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from msgspec.structs import replace

from tests.services.runtime.peers.issuing import authority, issue, write
from tokenloom.engine_core.data.config import EngineConfig, TLSFiles
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion, KVTransferError, KVTransport
from tokenloom.services.engine.core.core_main import make_transports
from tokenloom.services.runtime.peers import certificate
from tokenloom.services.runtime.peers.certificate_files import dns_name

ENGINE = x509.DNSName(dns_name("engine"))
LAYOUT = "test"


@pytest.fixture
def pool() -> Iterator[KVPool]:
    memory = PoolMemory.allocate(64, False)
    yield KVPool(memory, (KVRegion(0, 16),), 4, LAYOUT)
    memory.close()


def socket_transport(folder: Path, listen: str = "") -> KVTransport:
    files = TLSFiles(str(folder / "ca.crt"), str(folder / "tls.crt"), str(folder / "tls.key"), dns_name("engine"))
    kv = replace(EngineConfig().kv, transports=("socket",), socket_listen=listen, socket_tls=files)
    (transport,) = make_transports(replace(EngineConfig(), kv=kv))
    return transport


def test_both_ends_follow_their_files(tmp_path: Path, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "CHECK_SECONDS", 0.0)
    old, new = authority("old"), authority("new")
    for name in ("owner", "reader", "outdated"):
        write(tmp_path / name, old, issue(old, ENGINE))
    owner = socket_transport(tmp_path / "owner", "127.0.0.1:0")
    reader, outdated = socket_transport(tmp_path / "reader"), socket_transport(tmp_path / "outdated")
    try:
        endpoint = owner.serve(pool)
        for transport in (reader, outdated):
            transport.open(endpoint, LAYOUT).read([0], [1], pool)
        for name in ("owner", "reader"):
            write(tmp_path / name, new, issue(new, ENGINE))
        reader.open(endpoint, LAYOUT).read([0], [1], pool)
        with pytest.raises(KVTransferError):
            outdated.open(endpoint, LAYOUT)
    finally:
        for transport in (reader, outdated, owner):
            transport.close()
