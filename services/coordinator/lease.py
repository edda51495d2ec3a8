"""Leases, which one process holds at a time. Processes of one machine use a lock on a file, which the kernel releases
when its holder ends. The pods of one namespace use a Lease object of Kubernetes, renewed by its holder, which is read
and written at the API server, with the service account of the pod.

The rules of the latter are those of client-go's leader election: only differences of one's own clock count, the
object's version decides between two pods that write at once, and a holder gives up before another pod may follow it.
"""

import asyncio
import fcntl
import http.client
import json
import logging
import os
import ssl
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tokenloom.request.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)


class LeaderLease(Protocol):
    """Is held by one process at a time."""

    async def acquire(self) -> None:
        """Return when this process holds the lease, however long that takes."""

    async def keep(self) -> None:
        """Keep the lease until cancelled. Raises ``FailedPrecondition`` when another process may have it."""

    async def release(self) -> None:
        """Let another process have the lease at once. Idempotent."""


_LOCK_POLL_SECONDS = 0.1
"""How often a process that waits tries again: ``flock`` can wait only in a thread, which then cannot be ended."""


class FileLease:
    """Locks a file (``flock(2)``). A holder that is only stopped keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    async def acquire(self) -> None:
        """Return when the lock is held. Raises ``InvalidArgument`` if the file cannot be opened."""
        try:
            # The file is never removed: a process that had opened it before would lock a file that no other one can
            # see.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"lease: cannot open {self._path}: {error.strerror}", "lease") from None
        try:
            while not _locked(descriptor):  # noqa: ASYNC110 - a lock has no event
                await asyncio.sleep(_LOCK_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    async def keep(self) -> None:
        """Wait without end: nothing takes the lock from its holder."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Keep the lock until the process ends: until then its socket is at the address at which the next holder will
        listen, and closing that one removes it."""


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


LEASE_SECONDS = 2
"""How long a holder that renews nothing keeps the lease. Kubernetes wants whole seconds."""
GIVE_UP_SECONDS = 1.5
"""After so long without a renewal the holder stops, which leaves time to close its port before another pod follows."""
RENEW_SECONDS = 0.4
"""How often the holder renews."""
RETRY_SECONDS = 0.1
"""How long it waits after a renewal that failed."""
POLL_SECONDS = 0.25
"""How often a pod that waits looks; it looks too when the lease ends, if that is earlier."""


class LeaseRequests(Protocol):
    """What a lease needs of the API server; see :class:`.LeaseApi`. All methods raise ``ApiError``."""

    async def get(self, name: str) -> Object: ...

    async def create(self, lease: Object) -> Object: ...

    async def replace(self, lease: Object) -> Object: ...

    def close(self) -> None: ...


class KubernetesLease:
    """Competes for the Lease ``name`` as ``identity``, which must be unique among the pods."""

    def __init__(self, api: LeaseRequests, name: str, identity: str) -> None:
        self._api = api
        self._name = name
        self._identity = identity
        self._lease: Object | None = None  # as read or written last
        self._seen_at = 0.0  # loop time at which it had last changed
        self._is_held = False

    async def acquire(self) -> None:
        """Return when the lease is held."""
        problem = ""
        while True:
            try:
                if await self._try():
                    return
                problem = ""
            except ApiError as error:
                if error.status != CONFLICT and str(error) != problem:
                    problem = str(error)
                    log.warning("lease %s: %s", self._name, problem)
            await asyncio.sleep(self._seconds_to_wait())

    async def keep(self) -> None:
        """Renew the lease until cancelled. Raises ``FailedPrecondition`` if another pod has it, or if it could not be
        renewed for :data:`GIVE_UP_SECONDS`."""
        loop = asyncio.get_running_loop()
        try:
            while self._is_held:
                await asyncio.sleep(max(self._seen_at + RENEW_SECONDS - loop.time(), RETRY_SECONDS))
                # Checked after each sleep: a holder that was stopped with SIGSTOP comes back here, long after another
                # pod has followed it.
                deadline = self._seen_at + GIVE_UP_SECONDS
                if loop.time() >= deadline:  # nothing answered in time, or this process was stopped
                    raise TimeoutError
                async with asyncio.timeout_at(deadline):
                    await self._renew()
        except TimeoutError:
            raise self._lost("it could not be renewed in time") from None
        except ApiError as error:
            raise self._lost(str(error)) from None

    async def release(self) -> None:
        """Let another pod take the lease at once, if this one holds it. A failure only makes the next pod wait."""
        if self._is_held:
            await self._give_up()
        self._api.close()

    async def _give_up(self) -> None:
        assert self._lease is not None
        self._is_held = False
        # As client-go does it: an empty holder means free at once, and the API server accepts no duration of zero.
        self._lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._api.replace(self._lease)
        except ApiError as error:
            log.warning("lease %s: not released: %s", self._name, error)

    async def _try(self) -> bool:
        """Take the lease if it is free. Returns whether it is held now."""
        now = asyncio.get_running_loop().time()
        try:
            found = await self._api.get(self._name)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._hold(await self._api.create(self._object({})), now)
            return True
        # The clock of the holder may differ by minutes, so its renewTime says nothing here: the lease is counted from
        # the moment at which this pod saw the object change.
        if self._lease is None or _version(found) != _version(self._lease):
            self._seen_at = now
        self._lease = found
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity")
        # This pod's own identity stands there when the answer to its last request was lost.
        is_free = not holder or holder == self._identity
        if not is_free and now < self._ends_at():
            return False
        self._hold(await self._api.replace(self._object(found)), now)
        return True

    def _ends_at(self) -> float:
        """Return the loop time at which the lease ends that was read last, unless it changes before."""
        spec = (self._lease or {}).get("spec") or {}
        return self._seen_at + float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    def _seconds_to_wait(self) -> float:
        """Return how long to wait before the next look."""
        left = self._ends_at() - asyncio.get_running_loop().time()
        return left if 0 < left < POLL_SECONDS else POLL_SECONDS

    async def _renew(self) -> None:
        """Renew the lease once. Raises ``ApiError`` only if another pod has it."""
        if not self._is_held or self._lease is None:
            return  # it was released meanwhile
        now = asyncio.get_running_loop().time()  # before the request: the API server counts from later on
        self._lease["spec"]["renewTime"] = _timestamp()
        try:
            self._hold(await self._api.replace(self._lease), now)
        except ApiError as error:
            if error.status != CONFLICT:
                log.warning("lease %s: %s", self._name, error)
            else:
                await self._renew_changed(now)

    async def _renew_changed(self, now: float) -> None:
        """Renew the lease as it is now: the answer to an earlier renewal was lost, or an operator edited the object.
        Only its holder matters. Raises ``ApiError`` if another pod has it."""
        if not self._is_held:
            return  # it was released meanwhile
        try:
            found = await self._api.get(self._name)
        except ApiError as error:
            log.warning("lease %s: %s", self._name, error)
            return
        if (holder := (found.get("spec") or {}).get("holderIdentity")) != self._identity:
            raise ApiError(CONFLICT, f"{holder!r} has it")
        self._lease = found
        try:
            self._hold(await self._api.replace(found), now)
        except ApiError as error:
            log.warning("lease %s: %s", self._name, error)

    def _hold(self, lease: Object, now: float) -> None:
        self._lease, self._seen_at, self._is_held = lease, now, True

    def _object(self, found: Object) -> Object:
        """Return the Lease as this pod takes it. ``found``: the present one; empty if there is none."""
        spec = found.get("spec") or {}
        now = _timestamp()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**found.get("metadata", {}), "name": self._name},
            "spec": {
                **spec,
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + bool(found),
            },
        }

    def _lost(self, reason: str) -> FailedPrecondition:
        return FailedPrecondition(f"The lease {self._name} is lost: {reason}.")


def _version(lease: Object) -> object:
    return lease["metadata"].get("resourceVersion")


def _timestamp() -> str:
    """Return the time as Kubernetes' MicroTime, for people who read the object."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
