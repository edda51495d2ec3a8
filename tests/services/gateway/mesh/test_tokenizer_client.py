"""Replicas of the tokenizer: turns, retries, and replicas that differ from the first one."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc.aio
import httpx
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request import errors, wire_errors
from tokenloom.request.packed_ids import pack
from tokenloom.services.gateway.mesh.tokenizer_client import (
    LONG_BYTES,
    LOST_IN_A_ROUND,
    MAX_CALLS,
    MAX_LOST_ROUNDS,
    TokenizerClient,
)
from tokenloom.services.gateway.records.generate_request import Chat
from tokenloom.services.runtime.peers import retry_budget
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.services.runtime.streams.slotted_stream import MAX_WRONG_FRAMES
from tokenloom.v1 import tokenizer_pb2

BODY = {"prompt": "text", "max_tokens": 3}
RIGHT = tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(token_ids=[1])])
"""To one text."""


async def test_calls_take_turns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    for _ in range(6):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls == mesh.second_tokenizer.calls == 3


async def test_an_unavailable_replica_is_passed_over(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    mesh.tokenizer.unavailable = True
    for _ in range(4):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls >= 1


async def test_without_a_replica_a_request_waits_for_one(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.tokenizer.unavailable = mesh.second_tokenizer.unavailable = True
    mesh.outputs.auto = ["x"]
    waiting = asyncio.create_task(http.post("/v1/completions", json=BODY))
    async with asyncio.timeout(SOON):
        while mesh.tokenizer.calls + mesh.second_tokenizer.calls < 4:
            await asyncio.sleep(0)
            pass_time(0.01)
    assert not waiting.done()
    mesh.second_tokenizer.unavailable = False
    pass_time(1)
    assert (await waiting).status_code == 200


async def test_the_wait_ends_with_the_requests_deadline(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.tokenizer.unavailable = mesh.second_tokenizer.unavailable = True
    async with mesh.gateway(request_timeout=0.2), mesh.http() as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 504


async def test_a_replica_of_another_model_gets_nothing(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.second_tokenizer.fingerprint.tokenizer = b"other" * 4
    mesh.second_tokenizer.tells.clear()  # the first to answer is the one that is served
    async with mesh.gateway(), mesh.http() as http:
        mesh.second_tokenizer.tells.set()
        async with asyncio.timeout(SOON):
            while "differs from the first one" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        mesh.outputs.auto = ["x"]
        for _ in range(4):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert mesh.second_tokenizer.calls == 0


class DeadReplica:
    """A replica that no call reaches."""

    def __init__(self) -> None:
        self.calls = 0

    async def Encode(self, request: object, metadata: object) -> None:
        self.calls += 1
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


def client_of(replicas: Mapping[str, object]) -> TokenizerClient:
    """Return a client to which these replicas are alive."""
    client = TokenizerClient(PeerMembers(("unix:/none",)), Channels(None))
    client._stubs = dict(replicas)  # type: ignore[arg-type]
    client._alive = set(replicas)
    return client


async def test_calls_that_fail_everywhere_do_not_multiply() -> None:
    replicas = {f"unix:/{number}": DeadReplica() for number in range(8)}
    client = client_of(replicas)
    for _ in range(200):
        client._alive = set(replicas)
        call = asyncio.ensure_future(client.encode(["text"]))
        await settle()
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
    num_calls = sum(replica.calls for replica in replicas.values())
    assert 400 <= num_calls < 450  # one free retry each; a further one waits, and is paid from the budget


async def test_a_call_waits_for_a_replica_that_comes_back() -> None:
    dead = DeadReplica()
    client = client_of({"unix:/0": dead})
    call = asyncio.ensure_future(client.encode(["text"]))
    await settle()
    assert (dead.calls, client.num_alive, call.done()) == (1, 0, False)
    client._stubs["unix:/0"] = LivingReplica()  # type: ignore[assignment]
    client._learn("unix:/0", tokenizer_pb2.GetTokenizerInfoResponse())
    assert await call == RIGHT


async def test_a_replica_that_serves_something_else_gets_nothing_from_a_call_that_waits() -> None:
    dead, other = DeadReplica(), LivingReplica()
    client = client_of({"unix:/0": dead, "unix:/1": other})
    client._alive = {"unix:/0"}
    call = asyncio.ensure_future(client.encode(["text"]))
    await settle()
    pass_time(2)
    await settle()
    assert (dead.calls, other.calls, call.done()) == (1, 0, False)
    call.cancel()


async def test_a_text_with_which_replicas_are_lost_again_and_again_is_given_up() -> None:
    replicas = {f"unix:/{number}": DeadReplica() for number in range(3)}
    client = client_of(replicas)
    call = asyncio.ensure_future(client.encode(["text"]))
    async with asyncio.timeout(SOON):
        while not call.done():
            for address in replicas:
                client._learn(address, tokenizer_pb2.GetTokenizerInfoResponse())
            await settle()
            pass_time(1)
    with pytest.raises(errors.Internal, match="again and again"):
        await call
    assert sum(replica.calls for replica in replicas.values()) <= LOST_IN_A_ROUND * MAX_LOST_ROUNDS


SILENCES = ("keepalive watchdog timeout", "Stream removed (ping timeout)", "GOAWAY received; Debug Text: ping_timeout")
"""gRPC's words for a peer that did not answer pings in time, or found this side so."""


@pytest.mark.parametrize("words", SILENCES)
async def test_a_text_is_not_given_up_because_pings_are_late(words: str) -> None:
    """As on a busy machine, or over a link that loses packets: the replicas live."""
    silent = SilentReplica(words)
    client = client_of({"unix:/0": silent})
    call = asyncio.ensure_future(client.encode(["text"]))
    async with asyncio.timeout(SOON):
        while silent.calls <= 2 * LOST_IN_A_ROUND * MAX_LOST_ROUNDS:
            client._learn("unix:/0", tokenizer_pb2.GetTokenizerInfoResponse())
            await settle()
            pass_time(1)
    client._stubs["unix:/0"] = LivingReplica()  # type: ignore[assignment]
    client._learn("unix:/0", tokenizer_pb2.GetTokenizerInfoResponse())
    assert await call == RIGHT


@pytest.mark.parametrize("words", [*SILENCES, "Connection reset by peer"])
async def test_calls_of_a_replica_that_was_silent_need_no_budget_once_it_is_back(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tokenizer was starved twice within seconds, the calls went on one a second. One whose connection ends may
    have ended because of a text."""
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    client = client_of({"unix:/0": SilentReplica(words)})
    calls = [asyncio.ensure_future(client.encode(["text"])) for _ in range(4)]
    await settle()
    client._learn("unix:/0", tokenizer_pb2.GetTokenizerInfoResponse())
    await settle()
    assert client.num_alive == 0, "the first retry is free"
    client._stubs["unix:/0"] = LivingReplica()  # type: ignore[assignment]
    client._learn("unix:/0", tokenizer_pb2.GetTokenizerInfoResponse())
    await settle()
    assert [call.done() for call in calls] == [words in SILENCES] * 4
    for call in calls:
        call.cancel()


class SilentReplica:
    """A replica whose connection gRPC gives up."""

    def __init__(self, words: str) -> None:
        self.calls = 0
        self._words = words

    async def Encode(self, request: object, metadata: object) -> None:
        self.calls += 1
        await asyncio.sleep(0)  # so that all calls that are on the way fail
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, self._words)


class LostReplica(DeadReplica):
    """A replica whose calls fail some time later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_noticed = asyncio.Event()

    async def Encode(self, request: object, metadata: object) -> None:
        self.calls += 1
        await self.is_noticed.wait()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class LivingReplica:
    def __init__(self) -> None:
        self.calls = 0

    async def Encode(self, request: object, metadata: object) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        return RIGHT


class ClosedReplica(LivingReplica):
    """A replica whose channel this process closes during a call."""

    async def Encode(self, request: object, metadata: object) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        raise asyncio.CancelledError


async def test_a_call_whose_channel_is_closed_asks_another_replica() -> None:
    closed, living = ClosedReplica(), LivingReplica()
    client = client_of({"unix:/0": closed, "unix:/1": living})
    for _ in range(2):
        assert await asyncio.wait_for(client.encode(["text"]), SOON) == RIGHT
    assert (closed.calls, living.calls) == (1, 2)


async def test_calls_in_between_do_not_turn_a_retry_back_to_the_lost_replica() -> None:
    lost, living = LostReplica(), LivingReplica()
    client = client_of({"unix:/0": living, "unix:/1": lost})
    first = asyncio.ensure_future(client.encode(["text"]))
    await settle()
    await client.encode(["text"])
    lost.is_noticed.set()
    await first
    assert (lost.calls, living.calls) == (1, 2)


class SlowReplica:
    """A replica that answers when it is asked to."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()

    async def Encode(self, request: object, metadata: object) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        await self.answers.wait()
        return RIGHT


async def test_a_burst_of_calls_waits_in_the_gateway() -> None:
    replica = SlowReplica()
    client = client_of({"unix:/0": replica})
    calls = [asyncio.ensure_future(client.encode(["text"])) for _ in range(3 * MAX_CALLS)]
    await settle()
    assert replica.calls == MAX_CALLS
    calls[-1].cancel()  # the deadline of a request that waits
    replica.answers.set()
    await asyncio.wait(calls)
    assert replica.calls == 3 * MAX_CALLS - 1


class BusyReplica:
    """A replica that renders no chat, because its machine is too busy, and encodes texts."""

    async def EncodeChat(self, request: object, metadata: object) -> None:
        status = wire_errors.to_status(errors.Unavailable("the machine is too busy")).SerializeToString()
        details = grpc.aio.Metadata(("grpc-status-details-bin", status))
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), details)

    async def Encode(self, request: object, metadata: object) -> tokenizer_pb2.EncodeResponse:
        return RIGHT


async def test_texts_do_not_wait_for_chats_that_no_replica_renders() -> None:
    client = client_of({"unix:/0": BusyReplica()})
    chats = [asyncio.ensure_future(client.encode_chat(Chat(b"[]"))) for _ in range(MAX_CALLS)]
    await settle()
    assert await client.encode(["text"]) == RIGHT
    assert client.num_alive == 1
    for chat in chats:
        assert not chat.done()
        chat.cancel()


class LyingReplica:
    """A replica whose answers are those of no request."""

    def __init__(self, answer: tokenizer_pb2.EncodeResponse) -> None:
        self.answer = answer
        self.calls = 0
        self.asked = tokenizer_pb2.EncodeRequest()

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, metadata: object) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        self.asked = request
        return self.answer


LIES = {
    "none": tokenizer_pb2.EncodeResponse(),
    "two": tokenizer_pb2.EncodeResponse(prompts=[*RIGHT.prompts, *RIGHT.prompts]),
    "token": tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(token_ids=[1, 256])]),
    "packed": tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(packed_token_ids=pack([1, 256]))]),
    "torn": tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(packed_token_ids=b"12345")]),
    "both": tokenizer_pb2.EncodeResponse(
        prompts=[tokenizer_pb2.TokenizedPrompt(token_ids=[1], packed_token_ids=pack([1]))]
    ),
    "part": tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(token_ids=[1], first_part_tokens=2)]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_cannot_be_is_asked_for_elsewhere(lie: str) -> None:
    liar, honest = LyingReplica(LIES[lie]), LyingReplica(RIGHT)
    client = client_of({"unix:/0": liar, "unix:/1": honest})
    client.info = tokenizer_pb2.GetTokenizerInfoResponse(vocab_size=256)
    for _ in range(20):
        assert await client.encode(["text"]) == RIGHT
    assert liar.calls == MAX_WRONG_FRAMES
    client._forgive("unix:/0")  # it was restarted
    await client.encode(["text"])
    await client.encode(["text"])
    assert liar.calls == MAX_WRONG_FRAMES + 1


async def test_packed_ids_are_taken_and_only_where_a_message_has_room() -> None:
    packed = tokenizer_pb2.EncodeResponse(prompts=[tokenizer_pb2.TokenizedPrompt(packed_token_ids=pack([1, 255]))])
    replica = LyingReplica(packed)
    client = client_of({"unix:/0": replica})
    client.info = tokenizer_pb2.GetTokenizerInfoResponse(vocab_size=256)
    long = "a" * (LONG_BYTES + 1)
    assert await client.encode([long], takes_packed_ids=True) == packed
    assert replica.asked.takes_packed_ids
    await client.encode([long])
    assert not replica.asked.takes_packed_ids
    await client.encode(["a" * (9 << 20)], takes_packed_ids=True)
    assert not replica.asked.takes_packed_ids


async def test_a_text_that_no_replica_answers_rightly_ends_typed() -> None:
    client = client_of({"unix:/0": LyingReplica(LIES["none"])})
    call = asyncio.ensure_future(client.encode(["text"]))
    async with asyncio.timeout(SOON):
        while not call.done():
            await settle()
            pass_time(1)
    with pytest.raises(errors.Internal, match="again and again"):
        await call
