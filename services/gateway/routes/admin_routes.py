"""Routes for operators, under vLLM's names, which ask every engine, and the list of the last requests."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs

from tokenloom.request import errors
from tokenloom.v1 import engine_pb2 as pb
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_DEAD
from tokenloom.v1.coordinator_pb2 import SetDesiredStateRequest as Wanted
from tokenloom.v1.encoder_pb2 import ResetCachesRequest

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Routes
from ..mesh.engine_calls import Ask, EngineCalls, alive, checked
from ..openapi import route_table
from ..openapi.response_schemas import EncodersDone, EnginesChanged, RequestsMoved
from ..records.request_ids import id_of_answer
from ..request_log.finished_request import LastRequests, RecentRequests
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes

_MODES = {"abort": pb.PAUSE_MODE_ABORT, "wait": pb.PAUSE_MODE_WAIT, "keep": pb.PAUSE_MODE_KEEP}
_TAGS = {"weights": pb.WAKE_TAG_WEIGHTS, "kv_cache": pb.WAKE_TAG_KV_CACHE, "scheduling": pb.WAKE_TAG_SCHEDULING}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminRoutes:
    """Pauses engines, puts them to sleep, resets their caches, moves their requests and records profiles."""

    meshes: ServedMeshes
    calls: EngineCalls

    def routes(self) -> Routes:
        return {
            route_table.PAUSE: self.pause,
            route_table.RESUME: self.resume,
            route_table.IS_PAUSED: self.is_paused,
            route_table.SLEEP: self.sleep,
            route_table.WAKE_UP: self.wake_up,
            route_table.IS_SLEEPING: self.is_sleeping,
            route_table.RELOAD_WEIGHTS: self.reload_weights,
            route_table.RESET_PREFIX_CACHE: self.reset_prefix_cache,
            route_table.RESET_MM_CACHE: self.reset_mm_cache,
            route_table.RESET_ENCODER_CACHE: self.reset_encoder_cache,
            route_table.MOVE_REQUESTS: self.move_requests,
            route_table.START_PROFILE: self.start_profile,
            route_table.STOP_PROFILE: self.stop_profile,
        }

    async def pause(self, exchange: HttpExchange) -> None:
        """``mode``: what happens to running requests; ``clear_cache``: whether to drop cached prefixes too."""
        query = Query(exchange.query, ("mode", "clear_cache"))
        mode = _MODES[query.choice("mode", _MODES, "abort")]
        request = pb.PauseRequest(mode=mode, clear_cache=query.boolean("clear_cache", True))
        await self._want(exchange, "paused", Wanted(pause=request), lambda stub: stub.Pause(request))

    async def resume(self, exchange: HttpExchange) -> None:
        Query(exchange.query)
        request = pb.ResumeRequest()
        await self._want(exchange, "resumed", Wanted(resume=request), lambda stub: stub.Resume(request))

    async def is_paused(self, exchange: HttpExchange) -> None:
        """Answer whether every engine is paused."""
        infos = await self._ask(lambda stub: stub.GetEngineInfo(pb.GetEngineInfoRequest()))
        engines = {name: info.pause_mode != pb.PAUSE_MODE_UNSPECIFIED for name, info in infos.items()}
        await exchange.respond(200, encode_json({"is_paused": all(engines.values()), "engines": engines}))

    async def sleep(self, exchange: HttpExchange) -> None:
        """``level``: how deep, 0 to 2; ``mode``: what happens to running requests."""
        query = Query(exchange.query, ("level", "mode"))
        mode = _MODES[query.choice("mode", _MODES, "abort")]
        request = pb.SleepRequest(level=int(query.choice("level", ("0", "1", "2"), "1")), mode=mode)
        await self._want(exchange, "asleep", Wanted(sleep=request), lambda stub: stub.Sleep(request))

    async def wake_up(self, exchange: HttpExchange) -> None:
        """``tags``: what to wake; none: everything."""
        tags = Query(exchange.query, ("tags",)).choices("tags", _TAGS)
        request = pb.WakeUpRequest(tags=[_TAGS[tag] for tag in tags])
        await self._want(exchange, "awake", Wanted(wake_up=request), lambda stub: stub.WakeUp(request))

    async def is_sleeping(self, exchange: HttpExchange) -> None:
        """Answer whether every engine sleeps."""
        answers = await self._ask(lambda stub: stub.IsSleeping(pb.IsSleepingRequest()))
        engines = {name: answer.sleeping for name, answer in answers.items()}
        await exchange.respond(200, encode_json({"is_sleeping": all(engines.values()), "engines": engines}))

    async def reload_weights(self, exchange: HttpExchange) -> None:
        """``path``: the checkpoint, on every engine's host; ``model``: whose engines; ``mode``: what happens to running
        requests. A path that an engine refuses changes nothing."""
        query = Query(exchange.query, ("path", "model", "mode"))
        mesh = self.meshes.pick(query.text("model", "") or None)
        mode = _MODES[query.choice("mode", _MODES, "wait")]
        request = pb.ReloadWeightsRequest(path=query.text("path", ""), mode=mode)
        engines = {engine.engine_id: engine.address for engine in alive(mesh.view)}
        await self.calls.check(engines, lambda stub: stub.CheckWeights(request))
        wanted = Wanted(weights=request)
        await self._want(exchange, "reloaded", wanted, lambda stub: stub.ReloadWeights(request), [mesh])

    async def reset_prefix_cache(self, exchange: HttpExchange) -> None:
        """``reset_running_requests``: preempt running requests instead of refusing."""
        preempt = Query(exchange.query, ("reset_running_requests",)).boolean("reset_running_requests", False)
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt)
        await self._do(exchange, "reset", lambda stub: stub.ResetPrefixCache(request))

    async def reset_mm_cache(self, exchange: HttpExchange) -> None:
        """Encoders forget rows, and the files that no request needs."""
        Query(exchange.query)
        await self._reset_encoders(exchange, [], ResetCachesRequest(files=True))

    async def reset_encoder_cache(self, exchange: HttpExchange) -> None:
        """Engines forget the rows that wait, encoders those that they keep."""
        Query(exchange.query)
        engines = await self._ask(lambda stub: stub.ResetEncoderCache(pb.ResetEncoderCacheRequest()))
        await self._reset_encoders(exchange, list(engines), ResetCachesRequest())

    async def move_requests(self, exchange: HttpExchange) -> None:
        """``request_id``: of one answer, or ``source``: of all that this engine runs; ``target``: where they go on."""
        query = Query(exchange.query, ("request_id", "source", "target"))
        request_id, source = query.text("request_id", ""), query.text("source", "")
        if bool(request_id) == bool(source):
            raise errors.InvalidArgument("name either a request_id or a source", "request_id")
        engines, target = self._engines(), query.text("target", "")
        for name, field in ((source, "source"), (target, "target")):
            if name and name not in engines:
                raise errors.NotFound(f"{field} {name[:64]} is no engine of this mesh: {', '.join(engines)}", field)
        request = pb.MoveRequestsRequest(
            request_id=id_of_answer(request_id) if request_id else "", target=target.rpartition("/")[2]
        )
        asked = {source: engines[source]} if source else engines
        if target:  # engines of several meshes may have the same name
            mesh = target.rpartition("/")[0]
            asked = {name: address for name, address in asked.items() if name.rpartition("/")[0] == mesh}
            if not asked:
                raise errors.InvalidArgument(f"{target[:64]} serves another model than {source[:64]}", "target")
        found = await self.calls.ask(asked, lambda stub: stub.MoveRequests(request))
        await exchange.respond(200, encode_json(_joined(found, request_id)))

    async def start_profile(self, exchange: HttpExchange) -> None:
        """``profile_prefix``: begins the names of the files."""
        prefix = Query(exchange.query, ("profile_prefix",)).text("profile_prefix", "")
        request = pb.StartProfileRequest(profile_prefix=prefix)
        await self._do(exchange, "recording", lambda stub: stub.StartProfile(request))

    async def stop_profile(self, exchange: HttpExchange) -> None:
        await self._do(exchange, "written", lambda stub: stub.StopProfile(pb.StopProfileRequest()))

    async def _do(self, exchange: HttpExchange, status: str, send: "Ask[object]") -> None:
        engines = list(await self._ask(send))
        await exchange.respond(200, encode_json({"status": status, "engines": engines}))

    async def _reset_encoders(
        self, exchange: HttpExchange, engines: Sequence[str], request: ResetCachesRequest
    ) -> None:
        """Answer when all encoders have reset their caches; a mesh may have none. Raises as :meth:`_ask`."""
        encoders = {
            entry.identity.engine_id if self.meshes.is_one else f"{mesh.model}/{entry.identity.engine_id}": (
                entry.identity.address
            )
            for mesh in self.meshes
            for entry in mesh.view.known_encoders
            if entry.report.state != ENGINE_STATE_DEAD
        }
        done = checked(await self.calls.ask_encoders(encoders, lambda stub: stub.ResetCaches(request)))
        await exchange.respond(200, encode_json(EncodersDone("reset", list(engines), sorted(done))))

    async def _want(
        self,
        exchange: HttpExchange,
        status: str,
        wanted: Wanted,
        send: "Ask[object]",
        meshes: Sequence[ServedMesh] = (),
    ) -> None:
        """Have the coordinators want a state, and answer with what has become of it. ``meshes``: theirs; empty: all.
        Raises ``Unavailable`` if there is no engine."""
        causes: dict[str, str] = {}
        for mesh in meshes or self.meshes:
            found = await self.calls.want(mesh.view, wanted, send)
            causes |= {name if self.meshes.is_one else f"{mesh.model}/{name}": cause for name, cause in found.items()}
        if not causes:
            raise errors.Unavailable("no engine is known; those that join take this state")
        await respond_changed(exchange, status, causes)

    async def _ask(self, send: "Ask[T]") -> dict[str, T]:
        """Return each engine's answer, by its name, which follows that of its model if there are several. All engines
        are asked, whatever one of them answers.

        Raises ``Unavailable`` without any engine, and otherwise the first failure, which begins with the engine's name.
        """
        # Asked under the operator's certificate. The gateway's own does not open EngineAdmin, or a gateway without
        # admin keys could pause engines.
        return checked(await self.calls.ask(self._engines(), send))

    def _engines(self) -> dict[str, str]:
        """Return the addresses of all engines by name, which follows that of the model if there are several."""
        return {
            engine.engine_id if self.meshes.is_one else f"{mesh.model}/{engine.engine_id}": engine.address
            for mesh in self.meshes
            for engine in alive(mesh.view)
        }


def _joined(found: Mapping[str, pb.MoveRequestsResponse | errors.TokenloomError], request_id: str) -> RequestsMoved:
    """Return what has become of requests on all engines. Raises what an engine answered if no other one ran any, and
    ``NotFound`` for a request that runs nowhere."""
    joined, failures = RequestsMoved(0, 0, 0, []), list[errors.TokenloomError]()
    for name, answer in found.items():
        if isinstance(answer, errors.TokenloomError):
            failures.append(answer)
            continue
        joined.moved += answer.moved
        joined.ended += answer.ended
        joined.stayed += answer.stayed
        joined.reasons += [f"{name}: {reason}" for reason in answer.reasons]
    if joined.moved or joined.ended or joined.stayed or not (failures or request_id):
        return joined
    if failures:
        raise failures[0]
    raise errors.NotFound(f"no engine runs request {request_id[:64]} now; it may wait, or have ended", "request_id")


async def respond_changed(exchange: HttpExchange, status: str, causes: Mapping[str, str]) -> None:
    """Answer with what has become of a state: 200 if all engines are in it, 202 with the causes of the others if not.

    ``causes``: for each engine why it is not in the state; empty: it is.
    """
    late = {name: cause for name, cause in causes.items() if cause}
    answer = EnginesChanged(status, "converging" if late else "done", sorted(causes.keys() - late.keys()), late)
    await exchange.respond(202 if late else 200, encode_json(answer))


class Query:
    """Reads the parameters of a query string. Every method raises ``InvalidArgument`` naming the parameter."""

    def __init__(self, raw: bytes, known: Collection[str] = ()) -> None:
        try:
            self._values: Mapping[str, list[str]] = parse_qs(raw.decode("ascii"), keep_blank_values=True)
        except ValueError:
            raise errors.InvalidArgument("the query string is not valid") from None
        for name in self._values:
            if name not in known:
                raise errors.InvalidArgument(f"{name[:64]}: no such parameter", name[:64])

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        return (self.choices(name, choices) or [default])[-1]

    def boolean(self, name: str, default: bool) -> bool:
        value = _BOOLEANS.get(self._values.get(name, [str(default)])[-1].lower())
        if value is None:
            raise errors.InvalidArgument(f"{name} must be true or false", name)
        return value

    def text(self, name: str, default: str) -> str:
        return self._values.get(name, [default])[-1]

    def choices(self, name: str, choices: Collection[str]) -> list[str]:
        """Return the values of a parameter that may be repeated."""
        values = self._values.get(name, [])
        if any(value not in choices for value in values):
            raise errors.InvalidArgument(f"{name} must be one of {', '.join(choices)}", name)
        return values


def request_routes(recent: RecentRequests) -> Routes:
    """Return ``GET /requests``: the last requests of this gateway."""

    async def last_requests(exchange: HttpExchange) -> None:
        await exchange.respond(200, encode_json(LastRequests(list(recent))))

    return {route_table.LAST_REQUESTS: last_requests}
