"""Serves this engine's pool over its transports, and records which of them other engines may be reading through."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tokenloom.process.fall_backs import OF_PROCESS

from .kv_transport import KVPool, KVTransport

READ_SECONDS = 12.0
"""How long a reader is attended after its last Acquire or Renew. Readers renew every 5 seconds."""
LINGER_SECONDS = 1.0
"""How long a reader is attended after its Release: a copy that it gave up may still run."""


class Endpoints:
    """Maps the names of transports to the endpoints that readers get. ``make`` may be called by any thread, everything
    else by the KV thread."""

    def __init__(self, transports: Iterable[KVTransport], clock: Callable[[], float] = time.monotonic) -> None:
        self._transports = list(transports)
        self._clock = clock
        self._pool: KVPool | None = None
        self._endpoints: dict[str, bytes] = {}
        self._waiting: dict[str, KVTransport] = {}
        """Transports that begin to serve when a reader first asks for them."""
        self._lock = threading.Lock()  # held while a transport begins to serve, so that it begins once
        self._read_until: dict[bytes, tuple[str, float]] = {}
        """By acquisition: the transport and until when its reader is attended. Past entries are dropped."""

    def serve(self, pool: KVPool) -> None:
        """Serve the pool over all transports that need not wait for a reader."""
        self._pool = pool
        for transport in self._transports:
            # nixl's agent with its polling thread kept 0.7 to 2 cores of an idle prefill and decode pair busy; made on
            # demand and without that thread, the pair uses 0.03.
            if transport.serves_on_demand:
                if pool.device is not None:
                    continue  # such a transport registers memory of the host
                self._waiting[transport.name] = transport
            elif (endpoint := transport.serve(pool)) is not None:
                self._endpoints[transport.name] = endpoint

    @property
    def names(self) -> list[str]:
        """The names of the transports that serve this pool, or will when a reader asks for them."""
        return sorted([*self._endpoints, *self._waiting])

    def choose(self, names: Sequence[str]) -> str | None:
        """Return the first of a reader's transports that serves this pool, or will; None if none does."""
        return next((name for name in names if name in self._endpoints or name in self._waiting), None)

    def find(self, name: str) -> bytes | None:
        """Return the endpoint of a transport; None if :meth:`make` must be called first."""
        return self._endpoints.get(name)

    def make(self, name: str) -> None:
        """Begin to serve over a transport that waits for its first reader. A transport that fails is not chosen again.

        Takes about half a second for nixl.
        """
        with self._lock:
            if (transport := self._waiting.get(name)) is None:
                return  # another reader asked at the same time
            assert self._pool is not None, "serve comes first"
            try:
                if (endpoint := transport.serve(self._pool)) is not None:
                    self._endpoints[name] = endpoint
            except Exception as error:  # each library has errors of its own
                OF_PROCESS.begin("kv_transport", f"{name}: {error}")
            del self._waiting[name]

    def attend(self, acquisition_id: bytes, name: str) -> None:
        """Note that a reader acquired a lease and may read through this transport from now on."""
        self._set(acquisition_id, name, READ_SECONDS)

    def renew(self, acquisition_id: bytes) -> None:
        """Note that a reader still reads."""
        if (known := self._read_until.get(acquisition_id)) is not None:
            self._set(acquisition_id, known[0], READ_SECONDS)

    def release(self, acquisition_id: bytes) -> None:
        """Note that a reader has ended its copy, or will soon."""
        if (known := self._read_until.get(acquisition_id)) is not None:
            self._set(acquisition_id, known[0], LINGER_SECONDS)

    def _set(self, acquisition_id: bytes, name: str, seconds: float) -> None:
        transport = next((each for each in self._transports if each.name == name), None)
        if transport is None or not transport.serves_on_demand:
            return
        now = self._clock()
        # Readers that died never release, so old entries are dropped whenever a new one comes.
        self._read_until = {key: value for key, value in self._read_until.items() if value[1] > now}
        self._read_until[acquisition_id] = (name, now + seconds)
        transport.attend(max(until for key, until in self._read_until.values() if key == name) - now)
