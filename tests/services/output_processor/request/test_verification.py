"""A share of the requests that have ended is computed again on other engines, and the one that is wrong ends."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from tests.services.output_processor.fakes import LENGTH, SOON, STOP, EngineStream, Gateway, kv_source, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import DECODE, PREFILL
from tokenloom.request.request_records import RecordedLeg, RecordedLogprobs, RecordedOutput, RecordedRequest
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey
from tokenloom.services.output_processor.request import verification
from tokenloom.services.output_processor.request.verification import Mismatch, Opinion, Verifier, judged
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVGrant
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH = EngineRole.ENGINE_ROLE_BOTH
RIGHT, WRONG = [65, 66, 67], [65, 70, 67]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"verify": 1.0}


@pytest.fixture
def numerics() -> str:
    return "hash"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(verification, "OPINION_SECONDS", 0.05)
    monkeypatch.setattr(verification, "CALM_SECONDS", 0.0)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def counted(mesh: Mesh, outcome: str) -> float:
    name = "tokenloom_output_processor_verified_requests_total"
    return mesh.host.metrics.get_sample_value(name, {"outcome": outcome}) or 0.0


def answer(stream: EngineStream, add: AddRequest, tokens: Sequence[int], reason: Any = LENGTH) -> None:
    end = Finished(slot=add.slot, reason=reason, num_output_tokens=len(tokens))
    stream.send((add.slot, 0, tokens), finished=[end])


async def ask(mesh: Mesh, tokens: Sequence[int] = RIGHT, **fields: Any) -> tuple[Gateway, EngineStream]:
    """A request that the first engine answers with these tokens, to its stream."""
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, (5, 6, 7), **{"max_tokens": 3, "seed": 9, "temperature": 0.7, **fields})])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    answer(stream, add, tokens)
    assert (await gateway.until_finished(1))[1] == tokens
    return gateway, stream


async def opinion(mesh: Mesh, number: int, tokens: Sequence[int], stream: EngineStream | None = None) -> EngineStream:
    """Let an engine answer when it is asked what it computes. ``stream``: if it has one."""
    stream = stream or await mesh.engines[number].next_stream()
    (add,) = await stream.next_adds(1)
    answer(stream, add, tokens)
    return stream


async def quarantine(stream: EngineStream) -> str:
    """Wait until an engine is to end, and return why."""
    while not (message := await asyncio.wait_for(stream.inputs.get(), SOON)).HasField("quarantine"):
        pass
    assert message.quarantine.engine_epoch == stream.engine.identity.epoch
    return message.quarantine.reason


async def test_another_engine_computes_the_same_request_and_no_client_sees_it(mesh: Mesh) -> None:
    gateway, _ = await ask(mesh, tenant="payer")
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    assert list(add.prompt.token_ids) == [5, 6, 7]
    params = add.sampling_params
    assert (params.seed, params.temperature, params.max_tokens) == (9, pytest.approx(0.7), 3)
    assert add.prompt.cache_salt, "it hits no block of a client's request"
    assert (add.tenant, add.hold_kv) == ("payer", False), "its own tenant pays for it"
    answer(other, add, RIGHT)
    await until(lambda: counted(mesh, "equal") == 1)
    assert counted(mesh, "different") == counted(mesh, "dropped") == 0
    await gateway.send(submit=[submit(2, max_tokens=1)])  # nothing has come for a client in between
    assert mesh.host.fall_backs.active == []


@pytest.mark.parametrize("roles", [[BOTH] * 3])
@pytest.mark.parametrize(("third", "victim"), [(RIGHT, 0), (WRONG, 1)])
async def test_a_third_engine_decides_which_of_two_is_wrong(mesh: Mesh, third: list[int], victim: int) -> None:
    _, stream = await ask(mesh, WRONG)
    other = await opinion(mesh, 1, RIGHT)
    await opinion(mesh, 2, third)
    reason = await quarantine([stream, other][victim])
    assert "computed on engine-0: on engine-1 token 1 is 66 instead of 70" in reason
    await until(lambda: counted(mesh, "different") == 1)
    assert mesh.host.fall_backs.active == []


async def test_of_two_engines_one_that_computes_it_otherwise_now_is_wrong(mesh: Mesh) -> None:
    _, stream = await ask(mesh, WRONG)
    await opinion(mesh, 1, RIGHT)
    await opinion(mesh, 0, RIGHT, stream)
    assert "engine-0 computes it otherwise now" in await quarantine(stream)


async def test_the_engine_that_was_asked_may_be_the_wrong_one(mesh: Mesh) -> None:
    _, stream = await ask(mesh, RIGHT)
    other = await opinion(mesh, 1, WRONG)
    await opinion(mesh, 0, RIGHT, stream)
    await opinion(mesh, 1, RIGHT, other)
    assert "engine-1 computes it otherwise now" in await quarantine(other)


async def test_where_two_engines_stand_by_it_none_ends_and_operators_see_it(mesh: Mesh) -> None:
    _, stream = await ask(mesh, WRONG)
    other = await opinion(mesh, 1, RIGHT)
    await opinion(mesh, 0, WRONG, stream)
    await opinion(mesh, 1, RIGHT, other)
    await until(lambda: counted(mesh, "different") == 1)
    (shown,) = mesh.host.fall_backs.active
    assert (shown.kind, shown.subject) == ("unsettled_tokens", "engine-0, engine-1")
    assert "which engine is wrong is not known" in shown.detail
    assert not any(message.HasField("quarantine") for each in (stream, other) for message in list(each.inputs._queue))  # type: ignore[attr-defined]


async def test_an_engine_that_does_not_end_for_it_is_shown(mesh: Mesh) -> None:
    mesh.engines[0].can_be_quarantined = False
    _, stream = await ask(mesh, WRONG)
    await opinion(mesh, 1, RIGHT)
    await opinion(mesh, 0, RIGHT, stream)
    await until(lambda: counted(mesh, "different") == 1)
    (shown,) = mesh.host.fall_backs.active
    assert (shown.kind, shown.subject) == ("unsettled_tokens", "engine-0")
    assert "it runs without --verify and does not end: restart it" in shown.detail


async def test_a_mesh_keeps_its_engines_where_more_than_a_few_would_end(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "MOST_QUARANTINES", 0)
    _, stream = await ask(mesh, WRONG)
    await opinion(mesh, 1, RIGHT)
    await opinion(mesh, 0, RIGHT, stream)
    await until(lambda: counted(mesh, "different") == 1)
    (shown,) = mesh.host.fall_backs.active
    assert (shown.kind, "0 engines have ended for it in an hour" in shown.detail) == ("unsettled_tokens", True)


@pytest.mark.parametrize(("tokens", "found"), [([65, 66], "the end"), ([65, 66, 67, 68], "68")])
async def test_an_answer_that_is_longer_or_shorter_differs(mesh: Mesh, tokens: list[int], found: str) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, (5, 6, 7), max_tokens=9, seed=9)])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    answer(stream, add, RIGHT, STOP)
    await gateway.until_finished(1)
    other = await mesh.engines[1].next_stream()
    (again,) = await other.next_adds(1)
    assert again.sampling_params.max_tokens == 9, "the model's end is compared too"
    answer(other, again, tokens, STOP)
    await opinion(mesh, 0, tokens, stream)
    assert f"is {found} instead of" in await quarantine(stream)


async def test_behind_a_stop_string_nothing_is_computed(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    ids = mesh.ids("one two three")
    await gateway.send(submit=[submit(1, (5,), max_tokens=50, seed=9, stop=["two"])])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    stream.send((add.slot, 0, ids))
    stop = (await stream.next_input()).stop_at[0]
    stream.send(finished=[Finished(slot=add.slot, reason=STOP, num_output_tokens=stop.num_tokens)])
    await gateway.until_finished(1)
    other = await mesh.engines[1].next_stream()
    (again,) = await other.next_adds(1)
    assert again.sampling_params.max_tokens == stop.num_tokens
    answer(other, again, ids[: stop.num_tokens])
    await until(lambda: counted(mesh, "equal") == 1)


@pytest.mark.parametrize("roles", [[BOTH]])
async def test_without_another_engine_requests_are_dropped_and_operators_see_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 0.05)
    await ask(mesh)
    await until(lambda: counted(mesh, "dropped") == 1)
    (shown,) = mesh.host.fall_backs.active
    assert (shown.kind, shown.detail.split(" within")[0]) == (
        "unverified",
        "no engine that computes alike and had no part in a request had time",
    )


async def test_busy_engines_are_not_asked_and_one_that_becomes_crowded_is_left(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.coordinator.running = 5  # of no seats
    mesh.coordinator.publish()
    await mesh.coordinator.published()
    await ask(mesh)
    mesh.coordinator.running = 0
    mesh.coordinator.publish()
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    mesh.coordinator.waiting = 1
    mesh.coordinator.publish()
    assert list((await other.next_input()).abort_slots) == [add.slot]
    mesh.coordinator.waiting = 0
    mesh.coordinator.publish()
    await opinion(mesh, 1, RIGHT, other)
    await until(lambda: counted(mesh, "equal") == 1)


async def test_an_engine_that_is_to_be_rid_of_its_requests_is_left(mesh: Mesh) -> None:
    """As by ``tokenloom move``, which would otherwise name it as one that stays."""
    await ask(mesh)
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    other.send(granted=[KVGrant(slot=add.slot, kv=kv_source(add.slot), moves=True)])
    message = await other.next_input()
    assert (list(message.abort_slots), list(message.keep_slots)) == ([add.slot], [])
    await opinion(mesh, 1, RIGHT, other)
    await until(lambda: counted(mesh, "equal") == 1)


async def test_an_engine_that_is_lost_meanwhile_is_not_blamed(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 0.2)
    await ask(mesh)
    other = await mesh.engines[1].next_stream()
    await other.next_adds(1)
    other.die()
    await until(lambda: counted(mesh, "dropped") == 1)
    assert counted(mesh, "different") == 0


@pytest.mark.parametrize("numerics", ["cpu/bfloat16/avx512/torch-2.13.0", "vllm/0.11"])
async def test_engines_that_promise_no_equal_tokens_are_not_compared(mesh: Mesh) -> None:
    await ask(mesh)
    await until(lambda: counted(mesh, "unfit") == 1)
    (shown,) = mesh.host.fall_backs.active
    assert "may draw other tokens; --batch-invariant ones do not" in shown.detail


@pytest.mark.parametrize("roles", [[PREFILL, DECODE, BOTH]])
async def test_a_request_of_two_engines_is_computed_by_a_third_one(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, (5, 6, 7), max_tokens=3, seed=9)])
    prefill = await mesh.engines[0].next_stream()
    (add,) = await prefill.next_adds(1)
    prefill.prefilled(add.slot, 0, [65])
    decode = await mesh.engines[1].next_stream()
    (rest,) = await decode.next_adds(1)
    decode.send((rest.slot, 1, [66, 67]), finished=[Finished(slot=rest.slot, reason=LENGTH, num_output_tokens=3)])
    await gateway.until_finished(1)
    await opinion(mesh, 2, RIGHT)
    await until(lambda: counted(mesh, "equal") == 1)


@pytest.mark.parametrize("roles", [[BOTH] * 3])
async def test_an_engine_that_took_over_later_is_no_suspect(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, (5, 6, 7), max_tokens=3, seed=9)])
    first = await mesh.engines[0].next_stream()
    (add,) = await first.next_adds(1)
    first.send((add.slot, 0, [70, 66]))
    await gateway.next_frame()
    first.lose("GOAWAY")
    other = await mesh.engines[1].next_stream()
    (rest,) = await other.next_adds(1)
    other.send((rest.slot, 2, [67]), finished=[Finished(slot=rest.slot, reason=LENGTH, num_output_tokens=3)])
    await gateway.until_finished(1)
    await opinion(mesh, 2, RIGHT)
    await opinion(mesh, 1, RIGHT, other)  # its opinion counts: it has not computed the first token
    assert "engine-1 computes the same as engine-2" in await quarantine(await mesh.engines[0].next_stream())


@pytest.mark.parametrize("settings", [{"verify": 1e-9}])
async def test_a_request_that_is_not_sampled_leaves_nothing(mesh: Mesh) -> None:
    gateway, _ = await ask(mesh)
    await gateway.send(submit=[submit(2, max_tokens=1)])
    assert [counted(mesh, each) for each in ("equal", "different", "dropped", "unfit")] == [0, 0, 0, 0]
    assert mesh.engines[1].streams.empty()


def record(num_tokens: int = 1, **output: Any) -> RecordedRequest:
    legs = [RecordedLeg(engine="engine-0", epoch=11, kind="whole", numerics="hash")]
    return RecordedRequest(
        version=1,
        id="0" * 40,
        model="m",
        path="/m",
        tokenizer="",
        release="1",
        began_ms=0,
        ended_ms=1,
        prompt=[1],
        sampling_params={"seed": "1"},
        outputs=[
            RecordedOutput(
                **{"index": 0, "token_ids": [5] * num_tokens, "finish_reason": "stop", "legs": legs, **output}
            )
        ],
    )


async def test_an_engine_whose_context_is_too_short_is_not_asked() -> None:
    """It ended the output early, and was found wrong."""

    class Links:
        def __init__(self, name: str, longest_request: int) -> None:
            self.key, self.longest_request, self.is_asked = EngineKey(name, 1), longest_request, False
            self.serves = Fingerprint(numerics="hash")
            self.identity = EngineIdentity(engine_id=name, epoch=1)

        def add(self, request: AddRequest, attempt: Any, owner: Any) -> None:
            self.is_asked = True
            tokens = [5] * min(3, self.longest_request - 1)
            owner.on_tokens(attempt, 0, tokens, None)
            owner.on_finished(attempt, Finished(reason=LENGTH, num_output_tokens=len(tokens)))

        def abort(self, attempt: Any) -> None:
            pass

    class Quiet:
        links = [Links("short", 3), Links("long", 4)]

        def pool_of(self, weights: bytes, numerics: str) -> Fingerprint:
            return Fingerprint(weights=weights, numerics=numerics)

        async def place_quiet(self, _submit: Any, _pool: Any, exclude: Any, _only: Any) -> Any:
            found = (link for link in self.links if link.key not in exclude)
            return next((SimpleNamespace(link=link) for link in found), None)

    asked, placer = record(3), Quiet()
    case = verification._Case(placer, asked, asked.outputs[0], verification.request_of(asked))  # type: ignore[arg-type]
    assert await case.ask(SOON) == Opinion(EngineKey("long", 1), None)
    assert [link.is_asked for link in placer.links] == [False, True]


async def test_what_waits_is_bounded_by_its_bytes(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MOST_WAITING_BYTES", 3000)
    counts: list[str] = []
    verifier = Verifier(None, 1.0, b"", count=counts.append, fall_backs=mesh.host.fall_backs)  # type: ignore[arg-type]
    verifier.offer(record(800))
    verifier.offer(record(800))
    assert counts == []
    verifier.offer(record(800))
    assert counts == ["dropped"]
    verifier.offer(record(4000))
    assert counts == ["dropped"] * 2
    verifier.offer(replace(record(1), sampling_params={"structured_outputs": {"json": "x" * 4000}}))
    assert counts == ["dropped"] * 3, "a grammar counts, too"
    while verifier._waiting.qsize() < 100 and len(counts) < 4:
        verifier.offer(record(0))
    assert len(counts) == 4, "a record without tokens is none without memory"


async def test_of_what_waits_only_ids_are_kept(mesh: Mesh) -> None:
    verifier = Verifier(None, 1.0, b"", count=lambda _: None, fall_backs=mesh.host.fall_backs)  # type: ignore[arg-type]
    columns = [RecordedLogprobs(sampled=b"1234", ranks=[1])]
    verifier.offer(record(1, text="secret", logprobs=columns, prompt_logprobs=columns))
    kept = msgpack.decode(verifier._waiting.get_nowait()[1], type=RecordedRequest)
    assert (kept.outputs[0].text, kept.outputs[0].logprobs, kept.outputs[0].prompt_logprobs) == (None, [], [])
    assert kept.outputs[0].token_ids == [5]


async def test_half_of_a_request_is_not_computed_again(mesh: Mesh) -> None:
    verifier = Verifier(None, 1.0, b"", count=lambda _: None, fall_backs=mesh.host.fall_backs)  # type: ignore[arg-type]
    assert await verifier._verify(replace(record(), is_half=True)) == ("unfit", "")


@pytest.mark.parametrize(("share", "count"), [(1.0, 4000), (0.25, 1000), (1e-9, 0)])
async def test_the_share_is_that_of_the_ids(mesh: Mesh, share: float, count: int) -> None:
    verifier = Verifier(None, share, b"", count=lambda _: None, fall_backs=mesh.host.fall_backs)  # type: ignore[arg-type]
    assert abs(sum(verifier.wants(f"{number:040x}") for number in range(4000)) - count) <= 100


class FakeCase:
    """Engines whose opinions a test has written down; those that it does not know have left."""

    def __init__(self, suspects: str, opinions: dict[str, list[str]]) -> None:
        """``opinions``: by engine, in turn: ``-`` as recorded, otherwise another token."""
        self._suspects = frozenset(map(key, suspects))
        self._opinions = opinions

    def suspects_of(self, mismatch: Mismatch) -> frozenset[EngineKey]:
        return self._suspects

    async def ask(self, patience: float, *, exclude: Any = (), only: EngineKey | None = None) -> Opinion | None:
        names = [only.engine_id] if only else [each for each in sorted(self._opinions) if key(each) not in exclude]
        name = next((each for each in names if self._opinions.get(each)), None)
        return None if name is None else Opinion(key(name), mismatch(self._opinions[name].pop(0)))


def key(name: str) -> EngineKey:
    return EngineKey(name, 1)


def mismatch(found: str) -> Mismatch | None:
    return None if found == "-" else Mismatch(3, 0, ord(found))


@pytest.mark.parametrize(
    ("suspects", "opinions", "wrong"),
    [
        ("x", {"z": ["-"]}, "y"),
        ("x", {"z": ["b"]}, "x"),
        ("x", {"z": ["c"], "x": ["b"]}, "x"),
        ("x", {"z": ["c"], "x": ["-"], "y": ["b"]}, None),
        ("x", {"x": ["b"]}, "x"),
        ("x", {"x": ["c"]}, "x"),
        ("x", {"x": ["-"], "y": ["-"]}, "y"),
        ("x", {"x": ["-"], "y": ["c"]}, "y"),
        ("x", {"x": ["-"], "y": ["b"]}, None),
        ("x", {}, None),
        ("x", {"y": ["c"]}, "y"),
        ("pd", {"z": ["-"]}, "y"),
        ("pd", {"z": ["b"], "p": ["b"], "d": ["-"], "y": ["b"]}, "d"),
        ("pd", {"z": ["b"], "p": ["c"], "d": ["b"], "y": ["b"]}, "p"),
        ("pd", {"z": ["b"], "p": ["b"], "d": ["b"], "y": ["b"]}, None),
        ("pd", {"p": ["-"], "d": ["-"]}, "y"),
        ("pd", {"p": ["-"], "y": ["b"]}, None),
    ],
)
async def test_who_is_wrong(suspects: str, opinions: dict[str, list[str]], wrong: str | None) -> None:
    """``y`` has computed ``b`` where ``x``, or ``p`` and ``d``, had not; ``z`` is a third engine."""
    case: Any = FakeCase(suspects, opinions)
    found, why = await judged(case, key("y"), Mismatch(3, 0, ord("b")))
    assert (found and found.engine_id, bool(why)) == (wrong, True)
