"""Stands for the API server of Kubernetes: keeps Leases by its rules, in memory and behind HTTPS."""

import asyncio
import copy
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenloom.services.coordinator.lease import CONFLICT, NOT_FOUND, ApiError, LeaseApi, Object
from tokenloom.services.runtime.peers.certificate_files import dns_name
from tokenloom.supervisor.certificates import make_certificates

NAMESPACE = "mesh"
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
TOKEN = "first"
_NAMED = "coordinator"
"""The part whose certificate the server shows."""


def make_account(folder: Path) -> Path:
    """Write the files that Kubernetes mounts into a pod, and the server's certificate; return the folder."""
    make_certificates(folder, days=10)
    (folder / "namespace").write_text(NAMESPACE)
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


def local_api(account: Path, port: int) -> LeaseApi:
    """Return what reaches the server on this machine by the name in its certificate."""
    api = LeaseApi(account, dns_name(_NAMED), port)
    api._connection._create_connection = (  # type: ignore[attr-defined]
        lambda address, *rest: socket.create_connection(("127.0.0.1", address[1]), *rest)
    )
    return api


class LeaseServer:
    """Holds the Leases of one namespace. Its methods are those of ``LeaseApi``.

    Attributes:
        is_away: Requests get no answer.
        loses_answers: Requests are done, but their answers are lost.
        seconds: How long an answer takes to those who call the methods.
    """

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.is_away = self.loses_answers = False
        self.seconds = 0.0
        self._version = 0

    async def get(self, name: str) -> Object:
        return await self._answer_later("GET", name, None)

    async def create(self, lease: Object) -> Object:
        return await self._answer_later("POST", "", lease)

    async def replace(self, lease: Object) -> Object:
        return await self._answer_later("PUT", lease["metadata"]["name"], lease)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    async def _answer_later(self, method: str, name: str, body: Object | None) -> Object:
        await asyncio.sleep(self.seconds)
        return self.answer(method, name, body)

    def answer(self, method: str, name: str, body: Object | None) -> Object:
        if self.is_away:
            raise ApiError(0, "no answer")
        done = copy.deepcopy(self._do(method, name, copy.deepcopy(body)))
        if self.loses_answers and method != "GET":
            raise ApiError(0, "the answer was lost")
        return done

    def _do(self, method: str, name: str, body: Object | None) -> Object:
        if method == "GET":
            if name not in self.leases:
                raise ApiError(NOT_FOUND, f'leases.coordination.k8s.io "{name}" not found')
            return self.leases[name]
        assert body is not None
        self._check(body)
        metadata = body["metadata"]
        if method == "POST":
            name = metadata["name"]
            if name in self.leases:
                raise ApiError(CONFLICT, f'leases.coordination.k8s.io "{name}" already exists')
        elif name not in self.leases:
            raise ApiError(NOT_FOUND, f'leases.coordination.k8s.io "{name}" not found')
        elif metadata["resourceVersion"] != self.leases[name]["metadata"]["resourceVersion"]:
            raise ApiError(CONFLICT, "the object has been modified; please apply your changes to the latest version")
        self._version += 1
        self.leases[name] = {**body, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        return self.leases[name]

    def _check(self, lease: Object) -> None:
        spec = lease["spec"]
        assert (lease["apiVersion"], lease["kind"]) == ("coordination.k8s.io/v1", "Lease")
        if type(spec["leaseDurationSeconds"]) is not int or spec["leaseDurationSeconds"] <= 0:
            raise ApiError(422, "spec.leaseDurationSeconds: must be greater than 0")
        if type(spec["leaseTransitions"]) is not int or spec["leaseTransitions"] < 0:
            raise ApiError(422, "spec.leaseTransitions: must be greater than or equal to 0")


@contextmanager
def serving(leases: LeaseServer, account: Path) -> Iterator[int]:
    """Serve Leases over HTTPS to those who have the token; provide the port. ``account``: see :func:`make_account`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve(None)

        def do_PUT(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        do_POST = do_PUT

        def log_message(self, *_: object) -> None:
            """Write nothing."""

        def _serve(self, body: Object | None) -> None:
            try:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    raise ApiError(401, "Unauthorized")
                assert self.path.startswith(PATH)
                answer = leases.answer(self.command, self.path.removeprefix(PATH).lstrip("/"), body)
                status = 201 if self.command == "POST" else 200
            except ApiError as error:
                answer, status = {"kind": "Status", "message": str(error)}, error.status
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / f"{_NAMED}.crt", account / f"{_NAMED}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
