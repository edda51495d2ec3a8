"""A client of a gateway for the calls of :mod:`.calls`: what it holds, spends and was charged."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import MODEL, SOON, Part
from tests.plain_text import PLAIN_TEXT
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings

FIXED = {"model": MODEL, "ignore_eos": True, "temperature": 0}
"""Fields of a body that generates exactly as many tokens as it may."""


class Refused(Exception):
    """Raised for a call that was not answered. ``args[0]``: as :attr:`Reply.error`."""


class Client:
    """Calls one gateway with one key."""

    def __init__(self, gateway: Part, key: str) -> None:
        self.gateway = gateway
        self.key = key
        self.metadata = (("authorization", f"Bearer {key}"),)

    @property
    def url(self) -> str:
        service = self.gateway.service
        assert isinstance(service, GatewayService)
        return f"http://{service.http_address}"

    @property
    def address(self) -> str:
        assert isinstance(self.gateway.settings, GatewaySettings)
        return self.gateway.settings.listen

    def http(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.AsyncClient(base_url=self.url, timeout=SOON, verify=PLAIN_TEXT, headers=headers)

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """Return the answer's object. Raises ``Refused``."""
        async with self.http() as http:
            response = await http.post(path, json=body, headers=headers)
        if response.status_code != 200:
            raise Refused(str(response.status_code))
        return response.json()

    @asynccontextmanager
    async def held(self, max_tokens: int = 200) -> AsyncIterator[None]:
        """Have one output in work for the length of the ``async with``."""
        body = {**FIXED, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
        async with self.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            pieces = response.aiter_bytes()
            await anext(pieces)
            yield
            await pieces.aclose()  # type: ignore[attr-defined]

    @asynccontextmanager
    async def held_bytes(self, number: int) -> AsyncIterator[None]:
        """Have the gateway hold a body of so many bytes, which does not arrive."""
        _, writer = await self._connection()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {number}\r\n\r\n{{".encode())
        try:
            await self.until("tokenloom_tenant_body_bytes", lambda value: value >= number)
            yield
        finally:
            writer.close()
            await writer.wait_closed()
        await self.until("tokenloom_tenant_body_bytes", lambda value: not value)

    async def metric(self, name: str, **labels: str) -> float:
        """Return what the gateway's metrics page shows for this tenant, whose name is the key's."""
        labels = {"tenant": self.key, **labels}
        async with self.http() as http:
            text = (await http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"the page has no {name} with {labels}")

    async def until(self, name: str, holds: Callable[[float], bool], **labels: str) -> None:
        async with asyncio.timeout(SOON):
            while not holds(await self.metric(name, **labels)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def refused(self, limit: str) -> float:
        """Return how many of the tenant's requests this limit has refused."""
        return await self.metric("tokenloom_tenant_refused_requests_total", limit=limit)

    async def until_refused(self, limit: str, number: float) -> None:
        await self.until("tokenloom_tenant_refused_requests_total", lambda value: value >= number, limit=limit)

    async def until_idle(self) -> None:
        """Wait until no output of the tenant is in work."""
        await self.until("tokenloom_tenant_live_outputs", lambda value: not value)

    async def spend(self, burst: int) -> None:
        """Use up the tokens of a tenant that gets nearly none back."""
        while (left := burst - await self.charged()) > 8:
            body = {**FIXED, "prompt": [1, 2], "max_tokens": int(left) - 2}
            await self.post("/v1/completions", body)
            await self.until_idle()

    async def stalled(self, method: str, path: str) -> int:
        """Announce a body of which nothing arrives, and return the status of the answer."""
        reader, writer = await self._connection()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}content-type: {_content_type(path)}\r\ncontent-length: 100\r\n\r\n".encode())
        try:
            async with asyncio.timeout(SOON):
                line = await reader.readline()
        finally:
            writer.close()
        return int(line.split()[1])

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def charged(self) -> float:
        """Return the tokens that the tenant was charged."""
        return await self.metric("tokenloom_tenant_tokens_total")


def _content_type(path: str) -> str:
    return "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
