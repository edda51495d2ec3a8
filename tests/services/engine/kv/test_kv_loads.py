"""Decode legs: what the front says to the owner of the KV, and to its own core, in every turn that it can take."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.loop_clock import pass_time, settle
from tests.services.engine.kv.kv_fakes import (
    LEASE,
    FakeCore,
    owning_core,
    running_coordinator,
    running_front,
    source_at,
)
from tests.services.engine.peer import Peer, make_add, seconds
from tokenloom.engine_core.data.kv_messages import (
    LEASE_ENDS,
    KVAcquire,
    KVAnswer,
    KVOwnersLeft,
    KVProgress,
    KVRelease,
    KVRemoteProgress,
    KVRenew,
    KVVerdict,
    KVVerify,
)
from tokenloom.engine_core.data.messages import AcceptTokens, EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.services.engine.kv import kv_loads, kv_peers
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import engine_pb2
from tokenloom.v1.engine_pb2 import AddRequest, KVSource
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_ERROR, FINISH_REASON_LENGTH

PROMPT = list(range(1, 11))


@dataclass
class Pair:
    """An owner and a reader, and a peer of the reader."""

    owner: FakeCore
    owner_host: Host
    reader: FakeCore
    reader_host: Host
    peer: Peer

    def add(self, slot: int = 1, source: KVSource | None = None, **fields: Any) -> AddRequest:
        source = source or source_at(self.owner_host, len(PROMPT))
        return make_add(slot, PROMPT, 5, **{"kv_source": source, "accepted_token_ids": [7], **fields})

    def recomputes(self, reason: str) -> float | None:
        return counted(self.reader_host.metrics, "tokenloom_kv_recompute_total", reason=reason)


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"engine": "decode-0", "model_name": "tokenloom-demo", **labels})


@pytest.fixture
async def pair(socket_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    owner = owning_core(len(PROMPT), **getattr(request, "param", {}))
    reader = FakeCore()
    async with (
        running_coordinator(socket_dir),
        running_front(socket_dir, "prefill-0", owner, role="prefill") as owner_host,
        running_front(socket_dir, "decode-0", reader, role="decode") as reader_host,
        Peer(reader_host.address) as peer,
    ):
        yield Pair(owner, owner_host, reader, reader_host, peer)


async def test_a_lease_is_acquired_then_released_when_the_core_has_copied(pair: Pair) -> None:
    add = pair.add()
    add.prompt.cache_salt = b"tenant"
    await pair.peer.send(add)
    acquire = await pair.owner.noted(KVAcquire)
    assert acquire.lease_id == LEASE
    assert acquire.prompt_digest == prompt_digest(PROMPT, b"tenant")
    assert acquire.transports == ["shm", "socket"]
    request = await pair.reader.noted(EngineCoreRequest)
    assert request.remote_kv is not None
    assert (request.remote_kv.endpoint, request.remote_kv.block_ids) == (b"there", [0, 1, 2])
    assert request.remote_kv.num_tokens == len(PROMPT)
    assert not pair.owner.has_noted(KVRelease)
    assert not pair.owner.has_noted(KVProgress)  # there is a first token, so that the prefill was complete
    pair.reader.say(KVVerify(request.request_id, copied=True))
    assert (await pair.owner.noted(KVRelease)).generations == [9, 9, 9]
    assert await pair.reader.noted(KVVerdict) == KVVerdict(request.request_id, True, checksums=[5, 5, 5])
    pair.reader.put(EngineCoreOutput(request.request_id, [8], 1, kv_wait_ns=5))
    pair.reader.finish(request, [], FinishReason.LENGTH)
    finished = (await pair.peer.read_until_finished([1])).finished[1]
    assert (finished.reason, finished.num_output_tokens) == (FINISH_REASON_LENGTH, 2)
    assert finished.kv_wait_ns > 5


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("layout", "layout"), ("digest", "digest"), ("lease_expired", "lease_expired"), ("not_found", "not_found")],
)
async def test_what_the_owner_refuses_is_computed_here_and_counted(pair: Pair, failure: str, reason: str) -> None:
    pair.owner.answers[KVAcquire] = lambda call: KVAnswer(call.call_id, failure=failure, detail="so it is")
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    assert request.remote_kv is None
    assert request.accepted_token_ids == [7]
    assert pair.recomputes(reason) == 1


async def test_an_engine_that_nobody_knows_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.services.engine.kv.kv_peers.UNKNOWN_SECONDS", 0.05)
    stranger = KVSource(engine_id="prefill-0", engine_epoch=3, lease_id=LEASE, num_tokens=4)
    await pair.peer.send(pair.add(source=stranger))
    assert (await pair.reader.noted(EngineCoreRequest)).remote_kv is None
    assert pair.recomputes("owner_lost") == 1
    assert not pair.owner.has_noted(KVAcquire)


async def test_an_owner_may_not_choose_another_transport_nor_fewer_blocks(pair: Pair) -> None:
    good = pair.owner.answers[KVAcquire]
    for slot, (field, value, reason) in enumerate(
        [("transport", "carrier pigeon", "transport"), ("block_ids", [0], "layout"), ("generations", [], "layout")], 1
    ):

        def answer(call: KVAcquire, field: str = field, value: object = value) -> KVAnswer | None:
            answer = good(call)
            assert answer is not None
            assert answer.target is not None
            answer.target = msgspec.structs.replace(answer.target, **{field: value})
            return answer

        pair.owner.answers[KVAcquire] = answer
        before = pair.recomputes(reason)
        await pair.peer.send(pair.add(slot))
        assert (await pair.reader.noted(EngineCoreRequest)).remote_kv is None
        assert pair.recomputes(reason) == (before or 0) + 1


async def test_blocks_that_changed_are_told_with_their_reason(pair: Pair) -> None:
    pair.owner.answers[KVRelease] = lambda call: KVAnswer(call.call_id, failure="generation_changed")
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    pair.reader.say(KVVerify(request.request_id, copied=True))
    verdict = await pair.reader.noted(KVVerdict)
    assert (verdict.valid, verdict.reason) == (False, "generation_changed")
    assert pair.reader_host.fall_backs.own() == [("kv_recomputed", "generation_changed")]


async def test_recomputing_is_shown_until_no_read_has_failed_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(slot: int, *, copied: bool) -> list[tuple[str, str]]:
        await pair.peer.send(pair.add(slot))
        request = await pair.reader.noted(EngineCoreRequest)
        pair.reader.say(KVVerify(request.request_id, copied=copied, failure="" if copied else "checksum"))
        await pair.owner.noted(KVRelease)
        if copied:
            assert (await pair.reader.noted(KVVerdict)).valid
        else:
            async with asyncio.timeout(60):
                await changed.wait()  # the owner's answer is on its way
        return pair.reader_host.fall_backs.own()

    shown, changed = [("kv_recomputed", "checksum")], asyncio.Event()
    pair.reader_host.fall_backs.on_change = changed.set
    assert await load(1, copied=True) == []
    assert await load(2, copied=False) == shown
    assert await load(3, copied=True) == shown, "every other request may fail"
    monkeypatch.setattr(kv_loads, "RECOVERED_SECONDS", 0.0)
    assert await load(4, copied=True) == []
    assert pair.reader_host.fall_backs.counts["kv_recomputed"] == 1


async def test_a_copy_that_was_given_up_still_ends_the_lease(pair: Pair) -> None:
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    pair.reader.say(KVVerify(request.request_id, copied=False))
    await pair.owner.noted(KVRelease)
    assert not pair.reader.has_noted(KVVerdict)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "CALL_SECONDS", 0.05)
    monkeypatch.setattr(kv_loads, "LATE_SECONDS", 0.01)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.usefixtures("impatient")
async def test_a_lease_whose_owner_did_not_answer_is_released_later(pair: Pair, copied: bool) -> None:
    """Otherwise it would hold blocks there until it ends by itself."""
    answer, silence = pair.owner.answers[KVRelease], [True, True, True]
    pair.owner.answers[KVRelease] = lambda call: silence.pop() and None if silence else answer(call)
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    pair.reader.say(KVVerify(request.request_id, copied=copied))
    for _ in range(4):
        await pair.owner.noted(KVRelease)
    if copied:
        assert await pair.reader.noted(KVVerdict) == KVVerdict(request.request_id, False, "timeout")
    pass_time(1.0)
    await settle()
    assert not pair.owner.has_noted(KVRelease), "it has ended"


@pytest.mark.usefixtures("impatient")
async def test_a_lease_that_was_acquired_without_an_answer_is_released(pair: Pair) -> None:
    answer, silence = pair.owner.answers[KVAcquire], [True, True]
    pair.owner.answers[KVAcquire] = lambda call: silence.pop() and None if silence else answer(call)
    await pair.peer.send(pair.add())
    assert (await pair.reader.noted(EngineCoreRequest)).remote_kv is None
    assert pair.recomputes("timeout") == 1
    assert (await pair.owner.noted(KVRelease)).acquisition_id == b"reading"


@pytest.mark.parametrize("is_aborted", [True, False])
@pytest.mark.usefixtures("impatient")
async def test_a_lease_that_another_engine_may_read_is_not_taken_from_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """The output processor sends an attempt that is lost here without output elsewhere, with the same lease."""
    monkeypatch.setattr(kv_loads, "LATE_SECONDS", 1.0)
    answer, silence = pair.owner.answers[KVAcquire], [True]
    pair.owner.answers[KVAcquire] = lambda call: silence.pop() and None if silence else answer(call)
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    if is_aborted:
        await pair.peer.send(abort_slots=[1])
        await pair.reader.noted(str)
    else:
        pair.reader.finish(request, [8], FinishReason.STOP)
        await pair.peer.read_until_finished([1])
    await pair.owner.noted(KVAcquire)
    if not is_aborted:
        await pair.owner.noted(KVRelease)
        return
    for _ in range(20):
        pass_time(1.0)
        await settle()
    assert not pair.owner.has_noted(KVAcquire)


@pytest.mark.usefixtures("impatient")
async def test_an_owner_that_never_answers_is_not_asked_for_ever(pair: Pair) -> None:
    pair.owner.answers[KVRelease] = lambda call: None
    await pair.peer.send(pair.add())
    request = await pair.reader.noted(EngineCoreRequest)
    pair.reader.say(KVVerify(request.request_id, copied=False))
    for _ in range(6):
        await pair.owner.noted(KVRelease)
    pass_time(1.0)
    await settle()
    assert not pair.owner.has_noted(KVRelease)


async def test_a_transport_that_failed_is_not_asked_for_again(pair: Pair) -> None:
    await pair.peer.send(pair.add(1))
    assert (await pair.owner.noted(KVAcquire)).transports == ["shm", "socket"]
    request = await pair.reader.noted(EngineCoreRequest)
    pair.reader.say(KVVerify(request.request_id, copied=False, failure="transport"))
    await pair.owner.noted(KVRelease)
    await pair.peer.send(pair.add(2))
    assert (await pair.owner.noted(KVAcquire)).transports == ["socket"]


@pytest.mark.parametrize("pair", [{"ready": 4}], indirect=True)
async def test_a_lease_that_ends_early_is_told_unasked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "RENEW_SECONDS", 0.02)
    await pair.peer.send(pair.add(accepted_token_ids=[], awaits_tokens=True))
    request = await pair.reader.noted(EngineCoreRequest)
    assert await pair.reader.noted(KVRemoteProgress) == KVRemoteProgress(request.request_id, 4)
    await pair.owner.noted(KVRenew)
    await pair.owner.noted(KVRenew)
    assert not pair.reader.has_noted(KVVerdict)
    pair.owner.answers[KVRenew] = lambda call: KVAnswer(call.call_id, failure="lease_revoked")
    verdict = await pair.reader.noted(KVVerdict)
    assert verdict == KVVerdict(request.request_id, False, "lease_revoked")


@pytest.mark.parametrize("pair", [{"ready": 4}], indirect=True)
async def test_a_lease_that_ends_with_its_request_is_no_recompute(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_peers, "RENEW_SECONDS", 0.02)
    await pair.peer.send(pair.add(accepted_token_ids=[], awaits_tokens=True))
    request = await pair.reader.noted(EngineCoreRequest)
    pair.owner.answers[KVRenew] = lambda call: KVAnswer(call.call_id, failure="request_ended")
    assert await pair.reader.noted(KVVerdict) == KVVerdict(request.request_id, False, "request_ended")
    pair.owner.answers[KVAcquire] = lambda call: KVAnswer(call.call_id, failure="request_ended")
    await pair.peer.send(pair.add(2, accepted_token_ids=[], awaits_tokens=True))
    late = await pair.reader.noted(EngineCoreRequest)
    assert (late.remote_kv, late.awaits_tokens) == (None, True)
    assert pair.reader_host.fall_backs.own() == []
    assert not caplog.records
    assert [pair.recomputes(reason) or 0 for reason in LEASE_ENDS] == [0] * len(LEASE_ENDS)


@pytest.mark.parametrize("copied", [False, True])
async def test_an_owner_that_dies_is_noticed(socket_dir: Path, copied: bool) -> None:
    owner, reader = owning_core(len(PROMPT), ready=None if copied else 4), FakeCore()
    async with (
        running_coordinator(socket_dir),
        running_front(socket_dir, "decode-0", reader, role="decode") as host,
        Peer(host.address) as peer,
    ):
        async with running_front(socket_dir, "prefill-0", owner, role="prefill") as owner_host:
            source = source_at(owner_host, len(PROMPT))
            await peer.send(make_add(1, PROMPT, 5, kv_source=source, awaits_tokens=not copied))
            request = await reader.noted(EngineCoreRequest)
            if not copied:
                await reader.noted(KVRemoteProgress)
        if copied:  # then only the release would tell
            reader.say(KVVerify(request.request_id, copied=True))
        verdict = await reader.noted(KVVerdict)
        assert verdict == KVVerdict(request.request_id, False, "owner_lost")


async def test_under_the_other_policy_a_request_without_its_kv_fails(socket_dir: Path) -> None:
    owner, reader = owning_core(len(PROMPT)), FakeCore()
    owner.answers[KVAcquire] = lambda call: KVAnswer(call.call_id, failure="lease_expired")
    async with (
        running_coordinator(socket_dir),
        running_front(socket_dir, "prefill-0", owner) as owner_host,
        running_front(socket_dir, "decode-0", reader, kv_policy="fail") as host,
        Peer(host.address) as peer,
    ):
        await peer.send(make_add(1, PROMPT, 5, kv_source=source_at(owner_host, len(PROMPT))))
        finished = (await peer.read_until_finished([1])).finished[1]
        assert finished.reason == FINISH_REASON_ERROR
        assert finished.error.reason == "UNAVAILABLE"
        assert finished.error.HasField("retry_after")
        assert not reader.has_noted(EngineCoreRequest)


@pytest.mark.parametrize(("transports", "asked"), [(["shm", "socket"], ["socket"]), (["shm"], None)])
async def test_memory_is_not_shared_across_hosts(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, transports: list[str], asked: list[str] | None
) -> None:
    owner, reader = owning_core(len(PROMPT)), FakeCore()
    async with running_coordinator(socket_dir), running_front(socket_dir, "prefill-0", owner) as owner_host:
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        async with (
            running_front(socket_dir, "decode-0", reader, kv_transports=transports) as host,
            Peer(host.address) as peer,
        ):
            await peer.send(make_add(1, PROMPT, 5, kv_source=source_at(owner_host, len(PROMPT))))
            request = await reader.noted(EngineCoreRequest)
            if asked is None:
                assert request.remote_kv is None
                assert counted(host.metrics, "tokenloom_kv_recompute_total", reason="transport") == 1
            else:
                assert (await owner.noted(KVAcquire)).transports == asked


class TestTheStreamGoesOn:
    async def test_while_an_owner_does_not_answer(self, pair: Pair) -> None:
        del pair.owner.answers[KVAcquire]
        await pair.peer.send(pair.add(1), make_add(2, [1, 2, 3]))
        request = await pair.reader.noted(EngineCoreRequest)
        assert request.prompt_token_ids == [1, 2, 3]
        pair.reader.finish(request, [4], FinishReason.LENGTH)
        await pair.peer.read_until_finished([2])
        await pair.peer.send(abort_slots=[1])
        assert (await pair.peer.read_until_finished([1])).finished[1].reason == FINISH_REASON_ABORT

    async def test_and_an_owner_that_never_answers_is_done_without(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_peers, "CALL_SECONDS", 0.05)
        del pair.owner.answers[KVAcquire]
        await pair.peer.send(pair.add())
        assert (await pair.reader.noted(EngineCoreRequest)).remote_kv is None
        assert pair.recomputes("timeout") == 1


class TestAborts:
    async def test_while_acquiring_end_the_lease_and_never_reach_the_core(self, pair: Pair) -> None:
        held: list[KVAcquire] = []
        good = pair.owner.answers[KVAcquire]
        pair.owner.answers[KVAcquire] = held.append  # type: ignore[assignment]
        await pair.peer.send(pair.add())
        await pair.owner.noted(KVAcquire)
        await pair.peer.send(abort_slots=[1])
        await pair.peer.read_until_finished([1])
        answer = good(held[0])
        assert answer is not None
        pair.owner.say(answer)
        await pair.owner.noted(KVRelease)
        assert not pair.reader.has_noted(EngineCoreRequest)

    @pytest.mark.parametrize("pair", [{"ready": 4}], indirect=True)
    async def test_while_the_core_loads_end_both(self, pair: Pair) -> None:
        await pair.peer.send(pair.add())
        request = await pair.reader.noted(EngineCoreRequest)
        await pair.peer.send(abort_slots=[1])
        await pair.owner.noted(KVRelease)
        assert await pair.reader.noted(str) == request.request_id
        pair.reader.say(KVVerify(request.request_id, copied=False))  # what the core says to it is too late
        await pair.peer.send(pair.add(2))
        await pair.reader.noted(EngineCoreRequest)

    async def test_by_a_lost_stream_and_by_time_end_the_lease_too(self, pair: Pair) -> None:
        await pair.peer.send(pair.add(timeout=seconds(20)))
        await pair.reader.noted(EngineCoreRequest)
        pass_time(20)
        await pair.owner.noted(KVRelease)
        async with Peer(pair.reader_host.address) as peer:
            await peer.send(pair.add())
            await pair.reader.noted(EngineCoreRequest)
        await pair.owner.noted(KVRelease)


class TestTokensAheadOfWhichItWasAdded:
    def ahead(self, pair: Pair, slot: int = 1) -> AddRequest:
        return pair.add(slot, accepted_token_ids=[], awaits_tokens=True)

    async def accept(self, pair: Pair, slot: int, *token_ids: int) -> None:
        await pair.peer.send(accept=[engine_pb2.AcceptTokens(slot=slot, token_ids=token_ids)])

    async def test_reach_the_core_and_count(self, pair: Pair) -> None:
        await pair.peer.send(self.ahead(pair))
        request = await pair.reader.noted(EngineCoreRequest)
        assert request.awaits_tokens
        assert not request.accepted_token_ids
        await self.accept(pair, 1, 7, 8)
        assert await pair.reader.noted(AcceptTokens) == AcceptTokens(request.request_id, [7, 8])
        pair.reader.put(EngineCoreOutput(request.request_id, [9], 2, FinishReason.LENGTH))
        received = await pair.peer.read_until_finished([1])
        assert received.first_index[1] == 2
        assert received.finished[1].num_output_tokens == 3

    async def test_join_a_request_that_is_still_acquiring(self, pair: Pair) -> None:
        held: list[KVAcquire] = []
        good = pair.owner.answers[KVAcquire]
        pair.owner.answers[KVAcquire] = held.append  # type: ignore[assignment]
        await pair.peer.send(self.ahead(pair))
        await pair.owner.noted(KVAcquire)
        await self.accept(pair, 1, 7)
        await pair.peer.send(make_add(2, [1]))  # once this is there, so is what came before it
        await pair.reader.noted(EngineCoreRequest)
        answer = good(held[0])
        assert answer is not None
        pair.owner.say(answer)
        request = await pair.reader.noted(EngineCoreRequest)
        assert (request.accepted_token_ids, request.awaits_tokens) == ([7], False)
        assert not pair.reader.has_noted(AcceptTokens)

    @pytest.mark.parametrize("token_ids", [[], [2**32 - 1], [1] * 600])
    async def test_are_checked(self, pair: Pair, token_ids: list[int]) -> None:
        await pair.peer.send(self.ahead(pair))
        request = await pair.reader.noted(EngineCoreRequest)
        await self.accept(pair, 1, *token_ids)
        finished = (await pair.peer.read_until_finished([1])).finished[1]
        assert finished.error.field == "accepted_token_ids"
        assert await pair.reader.noted(str) == request.request_id

    async def test_are_for_those_that_await_them_once(self, pair: Pair) -> None:
        await self.accept(pair, 9, 7)  # unknown: ignored
        await pair.peer.send(self.ahead(pair))
        await pair.reader.noted(EngineCoreRequest)
        await self.accept(pair, 1, 7)
        await self.accept(pair, 1, 7)
        finished = (await pair.peer.read_until_finished([1])).finished[1]
        assert finished.error.reason == "INVALID_ARGUMENT"


async def test_what_belongs_to_an_owner_is_closed_when_it_leaves_and_is_read_no_more(socket_dir: Path) -> None:
    """The core kept the pool of a dead prefill engine mapped, and the front its channel, until a 65th came."""
    owner, reader = owning_core(len(PROMPT)), FakeCore()
    async with (
        running_coordinator(socket_dir),
        running_front(socket_dir, "decode-0", reader, role="decode") as reader_host,
        Peer(reader_host.address) as peer,
    ):
        async with running_front(socket_dir, "prefill-0", owner, role="prefill") as owner_host:
            source = source_at(owner_host, len(PROMPT))
            await peer.send(make_add(1, PROMPT, 5, kv_source=source, accepted_token_ids=[7]))
            request = await reader.noted(EngineCoreRequest)
            assert request.remote_kv is not None
            assert request.remote_kv.owner == f"prefill-0@{owner_host.epoch}"
            reader.say(KVVerify(request.request_id, copied=True))
            assert (await reader.noted(KVVerdict)).valid
            assert not reader.has_noted(KVOwnersLeft)
        assert await reader.noted(KVOwnersLeft) == KVOwnersLeft([f"prefill-0@{owner_host.epoch}"])
