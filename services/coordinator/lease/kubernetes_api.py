"""Reads and writes Lease objects at the API server of Kubernetes, with the service account of the pod."""

import asyncio
import http.client
import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

Object: TypeAlias = dict[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the token, the API server's authority and the namespace of the pod."""
API_SERVER = "kubernetes.default.svc"
"""The API server's name in every cluster; its certificate names it."""
TIMEOUT_SECONDS = 1.0
"""Of each read and write on the connection."""
_MOST_BYTES = 1 << 20
NOT_FOUND, CONFLICT = 404, 409


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    Attributes:
        status: HTTP status; 0: no answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LeaseApi:
    """Accesses the Leases of one namespace (``coordination.k8s.io/v1``), one request at a time, over one connection."""

    def __init__(self, account: Path = SERVICE_ACCOUNT, host: str = API_SERVER, port: int = 443) -> None:
        """``account``: a directory with the files ``token``, ``ca.crt`` and ``namespace``.

        Raises ``OSError`` if one of them cannot be read.
        """
        self._token = account / "token"
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{(account / 'namespace').read_text().strip()}/leases"
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._lock = threading.Lock()  # a request goes on when its caller is cancelled
        self._connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)

    async def get(self, name: str) -> Object:
        """Return a Lease. Raises ``ApiError``, with ``NOT_FOUND`` if there is none."""
        return await self._request("GET", f"{self._path}/{name}")

    async def create(self, lease: Object) -> Object:
        """Create a Lease and return it. Raises ``ApiError``, with ``CONFLICT`` if there is one."""
        return await self._request("POST", self._path, lease)

    async def replace(self, lease: Object) -> Object:
        """Replace a Lease that was read or written before, and return it. Raises ``ApiError``, with ``CONFLICT`` if
        another process has changed it meanwhile: ``metadata.resourceVersion`` differs."""
        return await self._request("PUT", f"{self._path}/{lease['metadata']['name']}", lease)

    def close(self) -> None:
        """Close the connection. A later request opens another one."""
        self._connection.close()

    async def _request(self, method: str, path: str, body: Object | None = None) -> Object:
        # The standard library's client in a thread: two calls a second are no reason for an asynchronous HTTP library.
        return await asyncio.to_thread(self._in_turn, method, path, body)

    def _in_turn(self, method: str, path: str, body: Object | None) -> Object:
        with self._lock:
            return self._exchange(method, path, body)

    def _exchange(self, method: str, path: str, body: Object | None) -> Object:
        payload = None if body is None else json.dumps(body).encode()
        try:
            # Kubernetes replaces the token before it expires, so it is read each time.
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}", "Content-Type": "application/json"}
            self._connection.request(method, path, payload, headers)
            response = self._connection.getresponse()
            answer = response.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens another one
            raise ApiError(0, f"the API server does not answer: {error}") from None
        if response.status >= 300:
            raise ApiError(response.status, f"the API server answered {response.status} {_message(answer)}")
        return _lease(answer)


def _lease(answer: bytes) -> Object:
    lease = _object(answer)
    if not isinstance(lease.get("metadata"), dict) or not isinstance(lease.get("spec") or {}, dict):
        raise ApiError(0, "the API server's answer is no Lease")
    return lease


def _object(answer: bytes) -> Object:
    try:
        parsed = json.loads(answer)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ApiError(0, "the API server's answer is no JSON object")
    return parsed


def _message(answer: bytes) -> str:
    """Return the ``message`` of a Status object."""
    try:
        status: Mapping[str, Any] = _object(answer)
    except ApiError:
        return ""
    return str(status.get("message", ""))[:200]
