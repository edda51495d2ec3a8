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
from tokenloom.services.engine.core.workers import make_part_transport
from tokenloom.services.runtime.peers import certificate
from tokenloom.services.runtime.peers.certificate_files import dns_name

ENGINE = x509.DNSName(dns_name("engine"))
LAYOUT = "test"


@pytest.fixture
def pool() -> Iterator[KVPool]:
    memory = PoolMemory.allocate(64, False)
    yield KVPool(memory, (KVRegion(0, 16),), 4, LAYOUT)
    memory.close()


def config_of(folder: Path, listen: str = "") -> EngineConfig:
    files = TLSFiles(str(folder / "ca.crt"), str(folder / "tls.crt"), str(folder / "tls.key"), dns_name("engine"))
    kv = replace(EngineConfig().kv, transports=("socket",), socket_listen=listen, socket_tls=files)
    return replace(EngineConfig(), kv=kv)


def socket_transport(folder: Path, listen: str = "") -> KVTransport:
    (transport,) = make_transports(config_of(folder, listen))
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


def test_parts_of_a_pool_leave_a_machine_with_a_certificate_only(tmp_path: Path, pool: KVPool) -> None:
    with pytest.raises(ValueError, match="KV blocks leave this host only under TLS"):
        make_part_transport(EngineConfig(), "192.0.2.1")
    mesh, strangers = authority("mesh"), authority("strangers")
    for name, issuer in (("owner", mesh), ("reader", mesh), ("stranger", strangers)):
        write(tmp_path / name, issuer, issue(issuer, ENGINE))
    owner, reader, stranger = (
        make_part_transport(config_of(tmp_path / name), "127.0.0.1") for name in ("owner", "reader", "stranger")
    )
    try:
        endpoint = owner.serve(pool)
        pool.rows(2)[0][:] = 7
        reader.open_regions(endpoint, LAYOUT, [range(1)]).read([2], [1], pool)
        assert (pool.rows(1)[0] == 7).all()
        with pytest.raises(KVTransferError):
            stranger.open_regions(endpoint, LAYOUT, [range(1)])
    finally:
        for transport in (reader, stranger, owner):
            transport.close()
