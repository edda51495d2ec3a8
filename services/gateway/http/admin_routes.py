"""Routes for who runs the mesh: vLLM's names, asked of every engine. There are none without an admin key."""

import asyncio
from collections.abc import Collection, Mapping
from typing import TypeVar
from urllib.parse import parse_qs

from tokenloom.request import errors
from tokenloom.v1 import engine_pb2 as pb

from ..mesh.engine_admins import Ask, EngineAdmins
from .app import Handler
from .exchange import Exchange
from .sse import encode_json

_MODES = {"abort": pb.PAUSE_MODE_ABORT, "wait": pb.PAUSE_MODE_WAIT, "keep": pb.PAUSE_MODE_KEEP}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_TAGS = {"weights": pb.WAKE_TAG_WEIGHTS, "kv_cache": pb.WAKE_TAG_KV_CACHE}

T = TypeVar("T")


class AdminRoutes:
    """Pause, sleep, caches and profiles of all engines."""

    def __init__(self, admins: EngineAdmins, *, timeout: float) -> None:
        """``timeout``: seconds that the slowest engine may take."""
        self._admins = admins
        self._timeout = timeout

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/pause": {"POST": self.pause},
            "/resume": {"POST": self.resume},
            "/is_paused": {"GET": self.is_paused},
            "/sleep": {"POST": self.sleep},
            "/wake_up": {"POST": self.wake_up},
            "/is_sleeping": {"GET": self.is_sleeping},
            "/reset_prefix_cache": {"POST": self.reset_prefix_cache},
            "/start_profile": {"POST": self.start_profile},
            "/stop_profile": {"POST": self.stop_profile},
        }

    async def pause(self, exchange: Exchange) -> None:
        """``mode``: what happens to running requests; ``clear_cache``: forget cached prefixes too."""
        query = Query(exchange.query, ("mode", "clear_cache"))
        mode = _MODES[query.choice("mode", _MODES, "abort")]
        request = pb.PauseRequest(mode=mode, clear_cache=query.boolean("clear_cache", True))
        await self._do(exchange, "paused", lambda stub: stub.Pause(request))

    async def resume(self, exchange: Exchange) -> None:
        Query(exchange.query, ())
        await self._do(exchange, "resumed", lambda stub: stub.Resume(pb.ResumeRequest()))

    async def is_paused(self, exchange: Exchange) -> None:
        """Whether every engine is."""
        told = await self._ask(lambda stub: stub.GetEngineInfo(pb.GetEngineInfoRequest()))
        engines = {name: info.pause_mode != pb.PAUSE_MODE_UNSPECIFIED for name, info in told.items()}
        await exchange.respond(200, encode_json({"is_paused": all(engines.values()), "engines": engines}))

    async def sleep(self, exchange: Exchange) -> None:
        """``level``: how deep, 0 to 2; ``mode``: what happens to running requests."""
        query = Query(exchange.query, ("level", "mode"))
        mode = _MODES[query.choice("mode", _MODES, "abort")]
        request = pb.SleepRequest(level=int(query.choice("level", ("0", "1", "2"), "1")), mode=mode)
        await self._do(exchange, "asleep", lambda stub: stub.Sleep(request))

    async def wake_up(self, exchange: Exchange) -> None:
        """``tags``: what to wake; none: all."""
        tags = Query(exchange.query, ("tags",)).choices("tags", _TAGS)
        request = pb.WakeUpRequest(tags=[_TAGS[tag] for tag in tags])
        await self._do(exchange, "awake", lambda stub: stub.WakeUp(request))

    async def is_sleeping(self, exchange: Exchange) -> None:
        """Whether every engine does."""
        told = await self._ask(lambda stub: stub.IsSleeping(pb.IsSleepingRequest()))
        engines = {name: answer.sleeping for name, answer in told.items()}
        await exchange.respond(200, encode_json({"is_sleeping": all(engines.values()), "engines": engines}))

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        """``reset_running_requests``: preempt them rather than refuse."""
        preempt = Query(exchange.query, ("reset_running_requests",)).boolean("reset_running_requests", False)
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt)
        await self._do(exchange, "reset", lambda stub: stub.ResetPrefixCache(request))

    async def start_profile(self, exchange: Exchange) -> None:
        await self._do(exchange, "recording", lambda stub: stub.StartProfile(pb.StartProfileRequest()))

    async def stop_profile(self, exchange: Exchange) -> None:
        await self._do(exchange, "written", lambda stub: stub.StopProfile(pb.StopProfileRequest()))

    async def _do(self, exchange: Exchange, status: str, send: "Ask[object]") -> None:
        told = await self._ask(send)
        await exchange.respond(200, encode_json({"status": status, "engines": list(told)}))

    async def _ask(self, send: "Ask[T]") -> dict[str, T]:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._admins.ask(send)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"an engine took longer than {self._timeout:g} s") from None


class Query:
    """The parameters of a query string, read by name and type. Every reader raises ``InvalidArgument`` naming the
    parameter."""

    def __init__(self, raw: bytes, known: Collection[str] = ()) -> None:
        try:
            self._values: Mapping[str, list[str]] = parse_qs(raw.decode("ascii"), keep_blank_values=True)
        except ValueError:
            raise errors.InvalidArgument("the query string is not valid") from None
        for name in self._values:
            if name not in known:
                raise errors.InvalidArgument(f"{name[:64]}: no such parameter", name[:64])

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        value = self._last(name, default)
        if value not in choices:
            raise errors.InvalidArgument(f"{name} must be one of {', '.join(choices)}", name)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = _BOOLEANS.get(self._last(name, str(default)).lower())
        if value is None:
            raise errors.InvalidArgument(f"{name} must be true or false", name)
        return value

    def choices(self, name: str, choices: Collection[str]) -> list[str]:
        """Return the values of a parameter that may be repeated."""
        values = self._values.get(name, [])
        if any(value not in choices for value in values):
            raise errors.InvalidArgument(f"{name} must be one of {', '.join(choices)}", name)
        return values

    def _last(self, name: str, default: str) -> str:
        return self._values.get(name, [default])[-1]
