"""Lists the routes of the page: its files, and what it shows as JSON."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.addresses import Address
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import coordinator_pb2
from tokenloom.v1.types_pb2 import MediaKind

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.response_counts import ResponseCounts
from ..http.route import Handler, Route, Routes
from ..mesh.mesh_view import engine_words, placement_values
from ..metrics.gateway_metrics import KvFlow
from ..openapi import route_table
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from .traffic import Traffics

_STATES = {True: "serving", False: "lost"}


def mesh_state(mesh: ServedMesh) -> dict[str, object]:
    """Return the mesh as this gateway sees it now, without addresses."""
    limits, missing = mesh.health.limits(), mesh.health.missing()
    return {
        "version": version("tokenloom"),
        "model": mesh.model,
        "max_model_len": limits.max_model_len if limits else None,
        "max_logprobs": limits.max_logprobs if limits else None,
        "reads_images": _reads(mesh, MediaKind.MEDIA_KIND_IMAGE),
        "reads_sounds": _reads(mesh, MediaKind.MEDIA_KIND_AUDIO),
        "missing": missing,
        "live": mesh.generator.num_live,
        "placement": mesh.view.placement,
        "parts": list(_parts(mesh)),
        "engines": list(_engines(mesh)),
        "kv_links": _links(mesh.metrics.kv_flow),
    }


def _reads(mesh: ServedMesh, kind: MediaKind) -> bool:
    """Return whether prompts may hold files of a kind and there is, or was, an encoder for them."""
    limits = mesh.health.limits()
    reads = limits is not None and kind in limits.media_kinds and not limits.cross_media_rows
    return reads and bool(mesh.view.known_encoders)


def _parts(mesh: ServedMesh) -> Iterator[dict[str, object]]:
    """Yield every replica of the parts other than engines. Encoders have names of their own, the others are numbered as
    their addresses are sorted."""
    yield _part("gateway", "gateway", "draining" if mesh.health.draining else "serving")
    yield _part("coordinator", "coordinator", _STATES[mesh.view.connected])
    for kind, states in (
        ("tokenizer", [_STATES[is_alive] for is_alive in mesh.tokenizers.replicas()]),
        ("output_processor", mesh.outputs.replicas()),
    ):
        for number, state in enumerate(states):
            yield _part(kind, f"{kind.replace('_', ' ')} {number}", state)
    for entry in sorted(mesh.view.known_encoders, key=lambda entry: _natural(entry.identity.engine_id)):
        state = coordinator_pb2.EngineState.Name(entry.report.state).removeprefix("ENGINE_STATE_").lower()
        yield _part("encoder", entry.identity.engine_id, "lost" if state == "dead" else state)


def _part(kind: str, name: str, state: str) -> dict[str, object]:
    return {"kind": kind, "name": name, "state": state}


def _engines(mesh: ServedMesh) -> Iterator[dict[str, object]]:
    """Yield the engines that the coordinator knows, and those that were lost, sorted by name."""
    rule = mesh.view.placement
    known = {entry.identity.engine_id: _engine(entry, rule) for entry in mesh.view.engines}
    for name, seconds in mesh.view.lost_engines().items():
        known[name] = {"name": name, "state": "lost", "lost_seconds": round(seconds, 1)}
    yield from (known[name] for name in sorted(known, key=_natural))


def _engine(entry: coordinator_pb2.EngineEntry, rule: str | None) -> dict[str, object]:
    report = entry.report
    return {
        "name": entry.identity.engine_id,
        **engine_words(entry),
        "running": report.running,
        "waiting": entry.waiting,
        "waiting_tokens": entry.waiting_tokens,
        "seats": report.seats,
        "kv_usage": round(report.kv_usage, 4),
        "num_kv_blocks": entry.identity.num_kv_blocks,
        "placement": placement_values(entry, rule),
    }


def _links(flow: KvFlow) -> list[dict[str, object]]:
    return [
        {
            "source": source,
            "target": target,
            "prompts": link.num_prompts,
            "tokens": link.num_tokens,
            "wait_ms": round(link.wait_ns / 1e6, 1),
        }
        for (source, target), link in flow.links.items()
    ]


def _natural(name: str) -> tuple[str, int, str]:
    """Sort ``engine-10`` after ``engine-9``."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name


PAGE_FILES = "/page/"
"""The paths of the page's files begin with it; the files hold nothing of the mesh."""
INDEX = "index.html"
_TYPES: Mapping[str, bytes] = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# The page runs only its own files and connects only to its own gateway; no other page may show it in a frame.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"cache-control", b"no-cache"),  # keep it, and ask whether it has changed
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """Holds one file and answers requests for it.

    Attributes:
        etag: The digest of the content, in quotation marks, as HTTP writes it.
    """

    content: bytes
    content_type: bytes
    etag: bytes

    async def __call__(self, exchange: HttpExchange) -> None:
        """Send the file, or 304 without it if the browser has this content already."""
        headers = (*_HEADERS, (b"etag", self.etag))
        if self.etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.start(304, headers)
            await exchange.finish()
        else:
            await exchange.respond(200, self.content, self.content_type, headers)


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the files of the page, by path."""
    return {path: _file(path, each.read_bytes()) for path, each in _walk(resources.files(__package__) / "static")}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _walk(each, f"{prefix}{each.name}/")
        else:
            yield prefix + each.name, each


def _file(name: str, content: bytes) -> StaticFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return StaticFile(content, _TYPES[name.rpartition(".")[2]], f'"{digest}"'.encode())


_TOKEN_HEADER = b"x-tokenloom-kill-token"
_KILL_SECONDS = 5.0
_MOST_BYTES = 1 << 16


class KillButton:
    """Kills an engine for the page of a demo: for a page of this machine only, with the token of this start."""

    def __init__(self, control: Path) -> None:
        """``control``: the supervisor's socket."""
        self._control = control
        self._token = secrets.token_urlsafe(24)

    def state(self) -> dict[str, str]:
        """Return the path of the kill, and the header and token that the page has to send with it."""
        return {"path": route_table.KILL_ENGINE.path, "header": _TOKEN_HEADER.decode(), "token": self._token}

    async def __call__(self, exchange: HttpExchange) -> None:
        """Answer with the engine's name. Raises ``PermissionDenied``, and ``Unavailable`` if too few engines serve."""
        self._check(exchange.headers)
        answer = await self._ask()
        if error := answer.get("error"):
            raise errors.Unavailable(f"No engine was killed: {error}.")
        await exchange.respond(
            200, encode_json({"engine": answer["engine"]}), headers=[(b"cache-control", b"no-store")]
        )

    def _check(self, headers: Mapping[bytes, bytes]) -> None:
        # The general check of Origin accepts its absence and whatever --cors-origins names; this one does not.
        origin = headers.get(b"origin", b"")
        scheme, _, site = origin.partition(b"://")
        if scheme not in (b"http", b"https") or site != headers.get(b"host") or not _is_loopback(site):
            raise errors.PermissionDenied("Only the page of a gateway on this machine kills an engine (Origin, Host).")
        if not hmac.compare_digest(headers.get(_TOKEN_HEADER, b""), self._token.encode()):
            raise errors.PermissionDenied(
                f"{_TOKEN_HEADER.decode()} must hold the token of /mesh; load the page again."
            )

    async def _ask(self) -> dict[str, str]:
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._control, limit=_MOST_BYTES)
                try:
                    writer.write(b'{"kind":"crash"}\n')
                    return msgspec.json.decode(await reader.readuntil(), type=dict[str, str])
                finally:
                    writer.close()
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise errors.Unavailable(f"The supervisor of the demo does not answer: {error!r}.") from None


def _is_loopback(site: bytes) -> bool:
    try:
        name = urlsplit(b"//" + site).hostname or b""
        return name == b"localhost" or Address(host=name.decode()).is_local
    except ValueError:
        return False


def page_routes(
    meshes: ServedMeshes, host: Host, counts: ResponseCounts, root: Handler, kills: Path | None = None
) -> Routes:
    """Return the routes. ``root``: answers clients other than browsers at ``/``. ``kills``: the supervisor's socket, by
    which the page may kill an engine; None: it may not."""
    button = KillButton(kills) if kills is not None else None
    traffics = Traffics(meshes, counts)
    host.spawn(traffics.run(), name="traffic of the last ten minutes")
    files = static_files()

    async def index(exchange: HttpExchange) -> None:
        wants_page = b"text/html" in exchange.headers.get(b"accept", b"")
        await (files[INDEX] if wants_page else root)(exchange)

    kill_engine = {"kill_engine": button.state() if button else None}
    return {
        route_table.ROOT: index,
        **({route_table.KILL_ENGINE: button} if button else {}),
        **{Route("GET", PAGE_FILES + name, is_open=True): file for name, file in files.items() if name != INDEX},
        route_table.MESH: _json(
            meshes, lambda mesh: {"models": list(meshes.states()), **mesh_state(mesh), **kill_engine}
        ),
        route_table.TRAFFIC: _json(meshes, lambda mesh: traffics.of(mesh).columns()),
    }


def _json(meshes: ServedMeshes, describe: Callable[[ServedMesh], object]) -> Handler:
    """Return a handler that describes the mesh of the model that the query names, the first one by default. Browsers
    do not keep the answer."""

    async def handler(exchange: HttpExchange) -> None:
        names = parse_qs(exchange.query.decode("latin-1")).get("model")
        mesh = meshes.pick(names[-1]) if names else meshes.first
        await exchange.respond(200, encode_json(describe(mesh)), headers=[(b"cache-control", b"no-store")])

    return handler
