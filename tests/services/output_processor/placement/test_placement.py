"""Tests that the last snapshot is used while the coordinator is away, and is replaced when it returns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.loop_clock import pass_time
from tests.services.output_processor.fakes import (
    SOON,
    FakeCoordinator,
    FakeEngine,
    serve_coordinator,
    serve_engine,
    submit,
)
from tokenloom.request import wire_errors
from tokenloom.request.errors import (
    EngineDied,
    EngineLacks,
    ResourceExhausted,
    TokenloomError,
    TryElsewhere,
    Unavailable,
)
from tokenloom.request.prefix_schedule import SESSION_HASHES
from tokenloom.services.output_processor.placement.engine_link import (
    IDLE_SECONDS,
    EngineAttempt,
    EngineLink,
    EngineLinks,
)
from tokenloom.services.output_processor.placement.engine_search import UNFIT_SECONDS, EngineSearch, Lifetime
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey
from tokenloom.services.output_processor.placement.pick_stream import ANSWER_SECONDS
from tokenloom.services.output_processor.placement.placement import LEFT_OUT_SECONDS, EngineCooldown, Placer
from tokenloom.services.runtime.peers import retry_budget
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.coordinator_pb2 import EngineIdentity, Position, Subset
from tokenloom.v1.engine_pb2 import AddRequest
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

FINGERPRINT = Fingerprint(model="m")


def engine(name: str, directory: Path) -> EngineIdentity:
    address = f"unix:{directory}/{name}"  # nothing listens there
    return EngineIdentity(engine_id=name, epoch=1, address=address, fingerprint=FINGERPRINT)


def without_time(**fields: Any) -> EngineSearch:
    lifetime = Lifetime(Submit(), 0.0)
    lifetime.give_up_at = 0.0
    return EngineSearch(RetryBudget(asyncio.get_running_loop().time), lifetime, **fields)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_without_a_token_goes_on_with_other_weights(socket_dir: Path, has_begun: bool) -> None:
    link = EngineLink(engine("a", socket_dir), make_hello("op", 3), Channels(), hang_seconds=60)
    replaced = Unavailable("the engine's weights were replaced; reconnect")
    assert without_time().refused(EngineAttempt(link), replaced, has_begun=has_begun) is not has_begun


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_an_engine_lacks_is_waited_for_where_others_had_it(socket_dir: Path, has_begun: bool) -> None:
    link = EngineLink(engine("theirs", socket_dir), make_hello("op", 3), Channels(), hang_seconds=60)
    search = EngineSearch(RetryBudget(asyncio.get_running_loop().time), Lifetime(Submit(), 0.0))
    lacks = EngineLacks("no grammars")
    assert search.refused(EngineAttempt(link), lacks, has_begun=has_begun)
    search.next_round(others_served=True)
    assert search.exclude == [link.key], "it stays left out"
    pass_time(UNFIT_SECONDS + 1)
    for others_served, began_at_theirs in ((True, True), (True, False), (False, False)):
        with nullcontext() if has_begun else pytest.raises(EngineLacks):
            search.next_round(others_served=others_served, began_at_theirs=began_at_theirs)
    with pytest.raises(EngineLacks):
        search.next_round(others_served=False, began_at_theirs=True)


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_engine_whose_step_hangs_is_not_back_because_it_is_connected(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    link = EngineLink(engine("a", socket_dir), make_hello("op", 3), Channels(), hang_seconds=60)
    link.fell_silent, link.may_compute = not hangs, True
    search = without_time(is_open=lambda key: key == link.key)
    for _ in range(2):
        search.lost(EngineAttempt(link), is_alone=False)
    with pytest.raises(Unavailable) if hangs else nullcontext():
        await search.wait_for_budget(asyncio.Event())


def ended_with(error: TokenloomError) -> grpc.aio.AioRpcError:
    """How a stream ends that its engine has ended."""
    details = grpc.aio.Metadata(("grpc-status-details-bin", wire_errors.to_status(error).SerializeToString()))
    return grpc.aio.AioRpcError(wire_errors.status_of(error), grpc.aio.Metadata(), details, error.message)


CUT = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed")


@pytest.mark.parametrize(
    ("cause", "is_blamed"),
    [
        (ended_with(TryElsewhere("The engine has stopped; retry the request.")), False),
        (ended_with(EngineDied("The engine failed; retry the request.")), True),
        (CUT, True),
    ],
)
async def test_a_request_is_not_blamed_for_an_engine_that_drains(
    socket_dir: Path, cause: BaseException, *, is_blamed: bool
) -> None:
    """A request on a link whose other direction was cut got there never: it ended after two such engines."""
    blames: list[bool] = []

    class Owner:
        def on_lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
            blames.append(is_alone)

    link = EngineLink(engine("a", socket_dir), make_hello("op", 3), Channels(), hang_seconds=60)
    attempt = EngineAttempt(link)
    attempt.owner = Owner()  # type: ignore[assignment]
    link._take_slot(attempt)
    link._end(cause)
    assert blames == [is_blamed]


@asynccontextmanager
async def placing(socket_dir: Path) -> AsyncIterator[Placer]:
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    channels = Channels()
    links = EngineLinks(
        lambda identity: make_hello("op", 3, expected_peer_id=identity.engine_id, initial_credit=64),
        failures.append,
        channels,
        hang_seconds=60,
        num_kept=2,
    )
    channel = channels.open(f"unix:{socket_dir}/c", "coordinator")
    placer = Placer(channel, FINGERPRINT, links, instance_id="op", subset_size=2)
    tasks.spawn(placer.run(), name="coordinator")
    try:
        yield placer
    finally:
        await tasks.close()
        await placer.close()
    assert not failures


async def test_the_coordinator_may_go_and_return(socket_dir: Path) -> None:
    async with placing(socket_dir) as placer:
        await go_and_return(socket_dir, placer)


async def go_and_return(socket_dir: Path, placer: Placer) -> None:
    with pytest.raises(Unavailable, match=r"No engine could take .* No engine is serving"):
        await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())

    fake = FakeCoordinator([engine("a", socket_dir)], [EngineRole.ENGINE_ROLE_BOTH])
    async with serve_coordinator(socket_dir / "c", fake):
        await asyncio.wait_for(fake.watched.wait(), SOON)
        with pytest.raises(Unavailable, match="No engine"):  # nothing listens where the coordinator sends it
            await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())
    with pytest.raises(Unavailable, match="No engine"):  # placed by the last snapshot
        await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())

    returned = FakeCoordinator([engine("b", socket_dir)], [EngineRole.ENGINE_ROLE_BOTH])
    async with serve_coordinator(socket_dir / "c", returned):
        await asyncio.wait_for(returned.watched.wait(), SOON)


@pytest.mark.parametrize("traced", [False, True])
async def test_a_frozen_coordinator_costs_one_request_its_second(socket_dir: Path, traced: bool) -> None:
    identity, headers = engine("a", socket_dir), {"traceparent": "x"} if traced else {}
    fake = FakeCoordinator([identity], [EngineRole.ENGINE_ROLE_BOTH])

    async def place(placer: Placer) -> bool:
        """Return whether the coordinator picked the engine."""
        attempt = await placer.place(submit(1, trace_headers=headers), EngineRole.ENGINE_ROLE_PREFILL, without_time())
        return attempt.pick is not None

    async with (
        serve_coordinator(socket_dir / "c", fake),
        serve_engine(FakeEngine(identity)),
        placing(socket_dir) as placer,
        asyncio.timeout(SOON),
    ):
        await fake.watched.wait()
        while not placer._picks.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await place(placer)
        fake.hold.clear()
        first = asyncio.create_task(place(placer))
        while len(fake.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        pass_time(0 if traced else ANSWER_SECONDS)  # gRPC does not see this clock
        assert not await first, "placed by the last snapshot"
        for _ in range(20):
            assert not await place(placer)
        assert len(fake.requests) == 2, "no other request asked"
        fake.hold.set()
        while placer._picks.is_away:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await place(placer)


async def test_picks_name_the_subset_of_this_process(socket_dir: Path) -> None:
    fake = FakeCoordinator([engine("a", socket_dir)], [EngineRole.ENGINE_ROLE_BOTH])
    fake.position = Position(index=3, count=7)
    async with serve_coordinator(socket_dir / "c", fake), placing(socket_dir) as placer, asyncio.timeout(SOON):
        while placer._subset is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(Unavailable):
            await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())
        assert (await fake.next_pick()).subset == Subset(index=3, count=7, size=2)


async def test_links_that_are_too_many_close_when_they_are_idle(socket_dir: Path) -> None:
    engines = [engine(name, socket_dir) for name in "abc"]
    fakes = {each.engine_id: FakeEngine(each) for each in engines}
    failures: list[BaseException] = []
    links = EngineLinks(
        lambda identity: make_hello("op", 3, expected_peer_id=identity.engine_id, initial_credit=64),
        failures.append,
        Channels(),
        hang_seconds=60,
        num_kept=1,
    )
    async with AsyncExitStack() as stack, asyncio.timeout(SOON):
        stack.push_async_callback(links.close)
        for each in fakes.values():
            await stack.enter_async_context(serve_engine(each))
        opened = {each.engine_id: await links.get(each) for each in engines}
        owner: Any = object()
        attempt = EngineAttempt(opened["b"])
        opened["b"].add(AddRequest(request_id="r"), attempt, owner)
        links._close_idle()
        assert links.num_open == 3, "none has been idle for long"
        pass_time(IDLE_SECONDS)
        links._close_idle()
        for name in "ac":
            await (await fakes[name].next_stream()).ended.wait()
        while links.num_open > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert opened["b"].error is None, "the one with a request stays"
        assert await links.get(engines[0]) is not opened["a"], "it opens again on demand"
        opened["b"].abort(attempt)
    assert not failures


async def test_an_engine_that_refused_is_left_out_while_the_coordinator_is_away(socket_dir: Path) -> None:
    both = [engine(name, socket_dir) for name in "ab"]
    fake = FakeCoordinator(both, [EngineRole.ENGINE_ROLE_BOTH] * 2)
    async with serve_engine(FakeEngine(both[0])), serve_engine(FakeEngine(both[1])), placing(socket_dir) as placer:
        async with serve_coordinator(socket_dir / "c", fake):
            await asyncio.wait_for(fake.watched.wait(), SOON)
            while not placer._snapshot._entries:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        now = 0.0
        placer._cooldown = EngineCooldown(lambda: now)

        async def placed(search: EngineSearch) -> str:
            attempt = await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, search)
            return attempt.link.key.engine_id

        refused = without_time()
        attempt = await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())
        placer.release(attempt)
        left = {"a": "b", "b": "a"}[attempt.link.key.engine_id]
        assert refused.refused(attempt, ResourceExhausted("full"), has_begun=False)
        assert await placed(refused) == left
        assert {await placed(without_time()) for _ in range(4)} == {left}
        now = LEFT_OUT_SECONDS
        assert await placed(without_time()) != left  # which has more to do
        for name in "ab":
            placer._cooldown.add(EngineKey(name, 1))
        assert await placed(without_time()) in "ab"  # better than none


async def test_the_only_engine_is_not_asked_for(socket_dir: Path) -> None:
    only, other = (engine(name, socket_dir) for name in "ab")
    only.limits.max_model_len = 4
    fake = FakeCoordinator([only], [EngineRole.ENGINE_ROLE_BOTH])
    async with (
        serve_coordinator(socket_dir / "c", fake),
        serve_engine(FakeEngine(only)),
        placing(socket_dir) as placer,
        asyncio.timeout(SOON),
    ):
        await fake.watched.wait()
        assert placer.at_once(submit(1)) is None, "no stream to it is open"
        await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())
        attempt = placer.at_once(submit(1))
        assert attempt is not None
        assert (attempt.link.key, attempt.pick, attempt.whole_request) == (EngineKey("a", 1), None, True)
        adapted = submit(1)
        adapted.prompt.adapter = b"a"
        for needs_answer in (
            submit(1, [1] * 4),  # too long
            submit(1, trace_headers={"traceparent": "x"}),
            submit(1, data_parallel_rank=0),
            submit(1, session=9),
            submit(1, keep_seconds=300),
            submit(1, block_hash_prefixes=range(SESSION_HASHES)),
            adapted,
        ):
            assert placer.at_once(needs_answer) is None
        fake.engines, fake.roles = [only, other], [EngineRole.ENGINE_ROLE_BOTH] * 2
        fake.publish()
        while placer.at_once(submit(1)) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(fake.requests) == 1
