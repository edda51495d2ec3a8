"""Certificate files that exist, appear late, are missing or are broken."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.peers.certificate import wait_for_files
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles, dns_name, service_of
from tokenloom.services.runtime.peers.tls import MeshTLS, PublicTLS
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.part import is_serving


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, days=30)
    return folder


def files(folder: Path, part: str) -> CertificateFiles:
    return CertificateFiles(folder / "ca.crt", folder / f"{part}.crt", folder / f"{part}.key")


def test_a_service_is_read_off_its_name() -> None:
    assert dns_name("output_processor") == "output-processor.tokenloom.internal"
    assert service_of(["output-processor.tokenloom.internal"]) == "output_processor"
    assert service_of(["engine.example.org", "engine.tokenloom.internal"]) == "engine"
    assert service_of(["tokenloom.internal", "example.org"]) is None


async def test_files_that_come_late_are_waited_for(tmp_path: Path, certificates: Path) -> None:
    waiting = asyncio.create_task(wait_for_files(files(tmp_path, "engine"), seconds=20))
    await asyncio.sleep(0)
    for name in ("ca.crt", "engine.crt", "engine.key"):
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
    await waiting
    MeshTLS(files(tmp_path, "engine"))


async def test_files_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"ca\.crt"):
        await wait_for_files(files(tmp_path, "engine"), seconds=0)


async def test_probes_and_scrapes_of_a_part_with_a_certificate(socket_dir: Path, certificates: Path) -> None:
    own = files(certificates, "engine")
    settings = ServiceSettings.of(
        listen="127.0.0.1:0",
        health_listen="127.0.0.1:0",
        metrics_listen="0.0.0.0:0",
        state_file=socket_dir / "state.json",
        tls_ca=own.ca,
        tls_cert=own.cert,
        tls_key=own.key,
    )
    async with running(Nothing(), settings) as host:
        state = json.loads((socket_dir / "state.json").read_text())
        assert await is_serving(state["health"])
        assert not await is_serving(state["address"])  # in plain text
        port = host.metrics_address.rpartition(":")[2]
        context = MeshTLS(files(certificates, "prometheus")).client_context()
        transport = httpx.AsyncHTTPTransport(verify=context)
        async with httpx.AsyncClient(transport=transport) as scraper:
            extensions = {"sni_hostname": "engine.tokenloom.internal"}
            answer = await scraper.get(f"https://127.0.0.1:{port}/metrics", extensions=extensions)
            assert "process_resident_memory_bytes" in answer.text
            expiries = _expiries(answer.text)
            assert expiries.keys() == {"mesh", "authority"}
            assert 29 * 86400 < expiries["mesh"] - time.time() < 31 * 86400
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as stranger:
                await stranger.get(f"http://127.0.0.1:{port}/metrics")


def _expiries(page: str) -> dict[str, float]:
    name = "tokenloom_certificate_expiry_timestamp_seconds"
    return {
        sample.labels["certificate"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


class Nothing:
    """A service without a servicer."""

    async def start(self, host: Host) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


def test_files_that_do_not_belong_together_are_refused(certificates: Path) -> None:
    mixed = CertificateFiles(certificates / "ca.crt", certificates / "engine.crt", certificates / "gateway.key")
    with pytest.raises(InvalidArgument, match=r"engine\.crt and gateway\.key"):
        MeshTLS(mixed)
    with pytest.raises(InvalidArgument, match="public_tls_cert"):
        PublicTLS(CertificateFiles(None, certificates / "engine.crt", certificates / "gateway.key", "public_tls_cert"))
