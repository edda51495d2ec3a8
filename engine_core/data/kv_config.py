"""Configuration of KV blocks that move: between engines, and out of the pool and back.

A store that engines share is named by a URL: ``file:///FOLDER`` of this host, or ``lm://HOST:PORT``, LMCache's server.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct

from tokenloom.process.plugins import check_named, kv_marks, plugged

TRANSPORTS = ("auto", "cuda", "shm", "nixl", "socket")
_Size = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(gt=0)]


class StorePlace(NamedTuple):
    """Says where a store is: a folder of this host, or a host and port."""

    folder: str
    host: str = ""
    port: int = 0


def store_place(url: str) -> StorePlace:
    """Return where the store of a URL is. Raises ``ValueError`` for another URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r:.80} is no URL: {error}") from None
    has_more = parts.query or parts.fragment or parts.username is not None
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/") and len(parts.path) > 1:
        if not has_more:
            return StorePlace(unquote(parts.path))
    elif parts.scheme == "lm" and parts.hostname and port and parts.path in ("", "/") and not has_more:
        return StorePlace("", parts.hostname, port)
    raise ValueError(f"must be file:///FOLDER or lm://HOST:PORT, not {url!r:.80}")


def _check_store(url: str) -> str:
    if url:
        store_place(url)
    return url


class TLSFiles(Struct, frozen=True):
    """The paths of a part's certificate, in PEM."""

    ca: str
    cert: str
    key: str
    peer_name: str
    """The name in the certificates of the peers that may connect or be connected to."""


class KVConfig(Struct, frozen=True):
    """KV blocks that move: between engines under leases, and out of the pool and back."""

    role: Annotated[
        Literal["both", "prefill", "decode"], "Which part of a request this engine computes: prefill, decode or both."
    ] = "both"
    transports: Annotated[
        tuple[str, ...],
        "Ways to read KV blocks of another engine, best first: auto, cuda, shm, nixl, socket, or plugins, as "
        "PACKAGE:NAME; by default auto for the roles prefill and decode, and none for both.",
        Meta(extra={"name": "kv_transports", **plugged("kv_transports", TRANSPORTS)}),
    ] = ()
    socket_listen: Annotated[
        str,
        "Address (host:port) of the transport socket; empty: only engines on this host can read. Workers on Ray listen "
        "at the addresses of their machines instead, on ports that the system chooses.",
        Meta(extra={"name": "kv_socket_listen"}),
    ] = ""
    socket_advertise: Annotated[
        str,
        "Host name under which engines reach that address; by default the host listened on.",
        Meta(extra={"name": "kv_socket_advertise"}),
    ] = ""
    socket_tls: TLSFiles | None = None
    """None: the socket transport stays on this host."""
    policy: Annotated[
        Literal["recompute", "fail"],
        "What happens if KV blocks cannot be loaded: recompute them here, or fail the request with a retryable error.",
        Meta(extra={"name": "kv_policy"}),
    ] = "recompute"
    checksum: Annotated[
        bool | None,
        "Compare a CRC-32 of every KV block that was read from another engine; by default of those that came through "
        "neither memory of one host (shm, cuda) nor TLS. Both engines must compare.",
        Meta(extra={"name": "kv_checksum"}),
    ] = None
    lease_seconds: Annotated[
        _Seconds,
        "Seconds that the KV blocks of a finished prefill are held unless the reader renews the lease.",
        Meta(extra={"name": "kv_lease_seconds"}),
    ] = 30.0
    load_timeout_seconds: Annotated[
        _Seconds,
        "Seconds without progress after which loading KV blocks is given up.",
        Meta(extra={"name": "kv_load_timeout"}),
    ] = 30.0
    offload_path: Annotated[
        str,
        "Directory of a file for evicted KV blocks; empty: they are dropped.",
        Meta(extra={"name": "kv_offload_path"}),
    ] = ""
    offload_bytes: Annotated[_Size, "Largest size of that file.", Meta(extra={"name": "kv_offload_bytes"})] = 0
    store: Annotated[
        str,
        "Store of KV blocks that engines of the same model share: file:///FOLDER, for engines of this host, or "
        "lm://HOST:PORT, LMCache's server; empty: none. Blocks are saved when they are computed.",
        Meta(extra={"name": "kv_store", "check": _check_store}),
    ] = ""
    store_bytes: Annotated[
        _Size,
        "Largest size of the folder of --kv-store, of all engines together, which are given the same.",
        Meta(extra={"name": "kv_store_bytes"}),
    ] = 0
    store_timeout_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=3600)],  # clocks of threads end with an OverflowError beyond some years
        "Seconds that a request waits for what --kv-store has of its prompt, and without an answer after which the "
        "store is left alone for a while.",
        Meta(extra={"name": "kv_store_timeout"}),
    ] = 1.0
    connector: Annotated[
        str,
        "What else saves and loads KV blocks: a plugin, as PACKAGE:NAME.",
        Meta(extra={"name": "kv_connector", **plugged("kv_connectors")}),
    ] = ""
    failpoints: Annotated[tuple[str, ...], "Faults to inject in tests: name=share, separated by commas."] = ()

    @property
    def tiers(self) -> dict[str, str]:
        """What keeps blocks outside of the pool, by the names of the settings; those that are empty are none."""
        return {"kv_offload_path": self.offload_path, "kv_store": self.store, "kv_connector": self.connector}

    @property
    def tier(self) -> str:
        """The name of the setting of one of these; empty: nothing keeps blocks outside of the pool."""
        return next((name for name, value in self.tiers.items() if value), "")

    def check_store(self, *, enable_prefix_caching: bool) -> None:
        """Raise ``ValueError``, naming the setting, if the store cannot be used."""
        if not self.store:
            if self.store_bytes:
                raise ValueError("kv_store_bytes: there is no kv_store; leave it out")
        elif not enable_prefix_caching:
            raise ValueError("kv_store: blocks are found by the hashes of prefix caching; set enable_prefix_caching")
        elif not store_place(self.store).folder:
            if self.store_bytes:
                raise ValueError("kv_store_bytes: bounds a folder; a server bounds itself; leave it out")
        elif not self.store_bytes:
            raise ValueError("kv_store: a folder needs kv_store_bytes, the largest size of all its blocks")

    def check_plugins(self, plugins: Sequence[str]) -> None:
        """Raise ``ValueError``, naming the setting, for a plugin of a package that is not among ``plugins``."""
        for name in self.transports:
            check_named(plugins, kv_transports=name)
        check_named(plugins, kv_connector=self.connector)

    def layout_of(self, common: str) -> str:
        """Return what engines compare before KV moves between them: what their layouts have in common, and the plugins
        that move it."""
        return "/".join((common, *kv_marks([*self.transports, self.connector])))
