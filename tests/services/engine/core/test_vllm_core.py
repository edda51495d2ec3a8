"""An engine whose requests a server with vLLM's contract computes: what it sends, and what it makes of the answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.ready_channel import ready_channel
from tests.services.engine.core.fake_vllm import VOCAB_SIZE, FakeVLLM
from tests.services.engine.peer import Peer, make_add
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams, GrammarKind, StructuredOutput
from tokenloom.engine_core.data.errors import EngineConfigError, EngineDeadError, EngineStartError, UtilityError
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SchedulerStats
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.reasoning import ReasoningStart
from tokenloom.request.wire_errors import from_proto
from tokenloom.services.engine.core import vllm_core
from tokenloom.services.engine.core.vllm_core import VLLMCore
from tokenloom.services.engine.core.vllm_server import VLLMServer, lacking
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_WAIT,
    Finished,
    GetEngineInfoRequest,
    PauseRequest,
    ResumeRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Choices,
    SamplingParams,
    StructuredOutputs,
)

PROMPT = [5, 6, 7]
CONSTRAINED = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(regex="a"))


def json_with(**options: Any) -> dict[str, Any]:
    """The field of a request that constrains its output to JSON."""
    return {"sampling_params": SamplingParams(structured_outputs=StructuredOutputs(json="{}", **options))}


RANKED: dict[str, Any] = {
    "token_id": 1,
    "logprob": -1.0,
    "top_logprobs": [{"token_id": 1, "logprob": -1.0, "rank": 1}],
}


def expected(count: int, prompt: list[int] | None = None) -> list[int]:
    return expected_tokens(prompt or PROMPT, count, VOCAB_SIZE)


def make_settings(directory: Path, server: FakeVLLM, **changes: Any) -> EngineSettings:
    values = {
        "worker": "hash",  # no fingerprint of weights
        "remote_vllm": server.url,
        "listen": f"unix:{directory}/engine",
        "metrics_listen": "",
        "frame_interval": 0.0,
        "drain_timeout": 30.0,
    }
    return EngineSettings.of(**{**values, **changes})


@asynccontextmanager
async def engine_of(directory: Path, server: FakeVLLM, **changes: Any) -> AsyncIterator[Host]:
    settings = make_settings(directory, server, **changes)
    async with running(EngineService(settings), settings) as host:
        yield host


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM() as server:
        yield server


@pytest.fixture
async def host(socket_dir: Path, server: FakeVLLM) -> AsyncIterator[Host]:
    async with engine_of(socket_dir, server, max_num_seqs=2) as host:
        yield host


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # of a server in this process, which nobody asks for it
            await asyncio.sleep(0.005)


def reason_of(finished: Finished) -> str:
    assert finished.reason == FINISH_REASON_ERROR
    error = from_proto(finished.error)
    return f"{error.reason}: {error.message}"


async def test_tokens_and_ends_are_those_of_the_server(host: Host, server: FakeVLLM) -> None:
    stop = expected(5)[4]
    stops = SamplingParams(max_tokens=9, stop_token_ids=[stop], temperature=0.0)
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, 4), make_add(2, PROMPT, sampling_params=stops))
        received = await peer.read_until_finished([1, 2])
    assert received.token_ids == {1: expected(4), 2: expected(5)}
    assert received.finished[1].reason == FINISH_REASON_LENGTH
    assert (received.finished[2].reason, received.finished[2].stop_token_id) == (FINISH_REASON_STOP, stop)
    assert [body["model"] for body in server.bodies] == ["served", "served"]


async def test_accepted_tokens_are_replayed_as_a_part_of_the_prompt(host: Host, server: FakeVLLM) -> None:
    known = expected(3)
    params = SamplingParams(max_tokens=8, min_tokens=5, seed=7, temperature=1.0)
    full = SamplingParams(max_tokens=3, temperature=0.0)
    async with Peer(host.address) as peer:
        await peer.send(
            make_add(1, PROMPT, accepted_token_ids=known, sampling_params=params),
            make_add(2, PROMPT, accepted_token_ids=known, sampling_params=full),
        )
        received = await peer.read_until_finished([1, 2])
    assert received.token_ids == {1: expected(8)[3:]}
    assert received.first_index == {1: 3}
    assert received.finished[1].num_output_tokens == 8
    assert received.finished[2].reason == FINISH_REASON_LENGTH
    (body,) = server.bodies
    assert body["token_ids"] == PROMPT + known
    assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["min_tokens"]) == (5, 2)
    assert body["sampling_params"]["seed"] not in (7, 0)


async def test_log_probabilities_have_the_alternatives_that_were_asked_for(host: Host) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, temperature=0.0)
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, sampling_params=params))
        received = await peer.read_until_finished([1])
    columns = received.logprobs[1]
    assert (columns.top, list(columns.token_id)) == (2, [0, 1] * 3)
    assert list(columns.rank) == [token_id + 1 for token_id in expected(3)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"sampling_params": CONSTRAINED, "accepted_token_ids": [1]},
            "structured outputs after tokens of another engine",
        ),
        ({"sampling_params": SamplingParams(logprobs=20)}, "more than 19 logprobs"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"sampling_params": SamplingParams(temperature=2.5)}, "a temperature above 2"),
        ({"sampling_params": SamplingParams(presence_penalty=1.0), "accepted_token_ids": [1]}, "presence_penalty"),
        (json_with(disable_any_whitespace=True), "disable_any_whitespace"),
        (json_with(whitespace_pattern=""), "whitespace_pattern"),
        ({"adapter": b"a" * 32}, "a LoRA adapter"),
        ({"priority": 3}, "priority"),
        ({"hold_kv": True}, "hold_kv"),
    ],
)
async def test_what_the_server_does_not_do_is_refused_by_name(
    host: Host, server: FakeVLLM, fields: dict[str, Any], named: str
) -> None:
    add = make_add(1, PROMPT, **{name: value for name, value in fields.items() if name != "adapter"})
    add.prompt.adapter = fields.get("adapter", b"")
    async with Peer(host.address) as peer:
        await peer.send(add)
        received = await peer.read_until_finished([1])
    reason = reason_of(received.finished[1])
    assert reason.startswith("ENGINE_LACKS: ")
    assert named in reason
    assert not server.bodies


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json": '{"type":"object"}'}, {"json": '{"type":"object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": Choices(texts=["yes", "no"])}, {"choice": ["yes", "no"]}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
    ],
)
async def test_constraints_hold_from_the_first_token(
    host: Host, server: FakeVLLM, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(**asked))
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, sampling_params=params))
        received = await peer.read_until_finished([1])
    assert received.finished[1].reason == FINISH_REASON_LENGTH
    (body,) = server.bodies
    assert (body["sampling_params"]["structured_outputs"], body["reasoning_ended"]) == (sent, True)


def test_a_constraint_that_begins_after_reasoning_is_not_the_servers() -> None:
    """Of a model that reasons, unless the prompt has ended that."""
    params = CoreSamplingParams(max_tokens=3, seed=0, structured_output=StructuredOutput(GrammarKind.REGEX, "a"))
    for start in ReasoningStart:
        request = EngineCoreRequest("a", PROMPT, params, reasoning_start=start)
        lacks = lacking(request, may_reason=True)
        assert lacks == ("" if start is ReasoningStart.CLOSED else "structured outputs after reasoning")
        assert not lacking(request)


async def test_what_the_server_refuses_is_told_as_its_own_limit(
    socket_dir: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.services.engine.core.fake_vllm.KNOWN", frozenset())
    async with engine_of(socket_dir, server) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT))
        received = await peer.read_until_finished([1])
    assert "ENGINE_LACKS: " in reason_of(received.finished[1])
    assert "it answered: unknown: " in reason_of(received.finished[1])


async def test_requests_beyond_the_seats_wait_and_both_are_reported(host: Host, server: FakeVLLM) -> None:
    server.after = 1
    async with Peer(host.address) as peer, ready_channel(host.address) as channel:
        await peer.send(*(make_add(slot, PROMPT, 3) for slot in (1, 2, 3)))
        await until(lambda: server.num_open == 2)
        await peer.read_tokens()
        info = await EngineAdminStub(channel).GetEngineInfo(GetEngineInfoRequest())
        assert (info.waiting, info.running, info.num_kv_blocks) == (1, 2, 512)
        assert info.fingerprint.numerics == "vllm/0.32.0"
        server.go.set()
        received = await peer.read_until_finished([1, 2, 3])
    assert received.token_ids == dict.fromkeys((1, 2, 3), expected(3))
    assert len(server.bodies) == 3


async def test_an_aborted_request_ends_at_the_server_too(host: Host, server: FakeVLLM) -> None:
    server.after = 1
    async with Peer(host.address) as peer:
        await peer.send(*(make_add(slot, PROMPT, 3) for slot in (1, 2, 3)))
        await until(lambda: server.num_open == 2)
        await peer.send(abort_slots=[1, 2])
        await until(lambda: server.num_left == 2 and server.num_open == 1)
        server.go.set()
        received = await peer.read_until_finished([1, 2, 3])
    assert received.finished[1].reason == FINISH_REASON_ABORT
    assert received.token_ids[3] == expected(3)


async def test_added_and_aborted_at_once(host: Host, server: FakeVLLM) -> None:
    """Its task is cancelled before its first turn; the seat must be free again."""
    async with Peer(host.address) as peer:
        for slot in (1, 2, 3, 4):
            await peer.send(make_add(slot, PROMPT, 3), abort_slots=[slot])
        await peer.send(make_add(5, PROMPT, 3))
        received = await peer.read_until_finished([1, 2, 3, 4, 5])
    assert received.token_ids[5] == expected(3)
    await until(lambda: server.num_open == 0)


async def test_a_lost_server_ends_the_engine_and_its_requests_may_go_on_elsewhere(
    socket_dir: Path, server: FakeVLLM
) -> None:
    server.after = 2
    async with engine_of(socket_dir, server) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, 9), make_add(2, PROMPT, 9))
        await until(lambda: server.num_open == 2)
        await server.kill()
        received = await peer.read_until_finished([1, 2])
        assert {reason_of(each).partition(":")[0] for each in received.finished.values()} == {"TRY_ELSEWHERE"}
        async with asyncio.timeout(30):
            assert "vLLM is lost" in str(await host.failure.take())


async def test_a_request_that_the_server_breaks_off_moves_while_the_server_stays(host: Host, server: FakeVLLM) -> None:
    server.change = lambda event: {"error": {"message": "Internal server error", "code": 500}}
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, 9))
        received = await peer.read_until_finished([1])
        assert reason_of(received.finished[1]).startswith("TRY_ELSEWHERE")
        server.change = lambda event: event
        await peer.send(make_add(2, PROMPT, 2))
        await peer.read_until_finished([2])
    assert received.token_ids == {2: expected(2)}


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [VOCAB_SIZE]},
        {"token_ids": [-1]},
        {"token_ids": list(range(20))},
        {"token_ids": [1], "finish_reason": "abort"},
        {"token_ids": "1"},
        {"token_ids": [1], "logprobs": None},
        {"token_ids": [1], "logprobs": {"content": [{**RANKED, "rank": -5}]}},
        {"token_ids": [1], "logprobs": {"content": [{**RANKED, "rank": 2**40}]}},
    ],
)
async def test_what_no_server_may_send_costs_its_own_request_only(
    host: Host, server: FakeVLLM, choice: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=9, logprobs=1, temperature=0.0)
    first = True

    def change(event: dict[str, Any]) -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            event["choices"][0] |= choice
        return event

    server.change = change
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT, sampling_params=params))
        received = await peer.read_until_finished([1])
        assert reason_of(received.finished[1]).startswith("TRY_ELSEWHERE")
        await peer.send(make_add(2, PROMPT, sampling_params=params))
        await peer.read_until_finished([2])
    assert received.token_ids[2] == expected(9)


async def test_pauses_keep_end_or_wait_for_requests(host: Host, server: FakeVLLM) -> None:
    server.after = 2
    async with Peer(host.address) as peer, ready_channel(host.address) as channel:
        admin = EngineAdminStub(channel)
        await peer.send(make_add(1, PROMPT, 5))
        while len(peer.received.token_ids.get(1, [])) < 2:
            await peer.read()
        await admin.Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
        await until(lambda: server.num_open == 0)
        await admin.Resume(ResumeRequest())
        await until(lambda: len(server.bodies) == 2)
        assert server.bodies[1]["token_ids"] == PROMPT + expected(2)
        server.after = None
        server.go.set()
        received = await peer.read_until_finished([1])
        assert received.token_ids[1] == expected(5)

        server.after = 1
        server.go.clear()
        await peer.send(make_add(2, PROMPT, 5))
        await until(lambda: server.num_open == 1)
        waiting = asyncio.ensure_future(admin.Pause(PauseRequest(mode=PAUSE_MODE_WAIT)))
        await peer.send(make_add(3, PROMPT, 2))
        server.go.set()
        await waiting
        assert (await peer.read_until_finished([2])).token_ids[2] == expected(5)
        await admin.Resume(ResumeRequest())
        await peer.read_until_finished([3])

        server.go.clear()
        await peer.send(make_add(4, PROMPT, 5))
        await until(lambda: server.num_open == 1)
        await admin.Pause(PauseRequest(mode=PAUSE_MODE_ABORT))
        received = await peer.read_until_finished([4])
        assert received.finished[4].reason == FINISH_REASON_ABORT
        await until(lambda: server.num_open == 0)


@pytest.mark.parametrize(
    ("server", "error", "named"),
    [
        (FakeVLLM(is_enabled=False), InvalidArgument, "--enable-scale-out"),
        (FakeVLLM(key="secret"), InvalidArgument, "--remote-vllm-key-file"),
        (FakeVLLM(root="/tmp"), InvalidArgument, "name the same for both"),
        (FakeVLLM(version=""), None, ""),
        (FakeVLLM(root="/" + 5000 * "x"), None, ""),
    ],
)
async def test_a_server_that_cannot_serve_is_refused_by_name(
    socket_dir: Path, server: FakeVLLM, error: type[Exception] | None, named: str
) -> None:
    async with server:
        if error is None:
            async with engine_of(socket_dir, server):
                return
        with pytest.raises(error, match=named):
            async with engine_of(socket_dir, server):
                raise AssertionError("it started")


@pytest.mark.parametrize(
    "changes", [{"version": "0.32.0/int8"}, {"version": 101 * "9"}, {"max_model_len": 2**40}, {"max_model_len": -1}]
)
async def test_a_server_that_says_nonsense_of_itself_is_not_served(server: FakeVLLM, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(EngineStartError, match="not of its contract"):
        async with core_of(server):
            raise AssertionError("it started")


async def test_a_server_that_is_busy_at_the_start_is_no_fault_of_the_options(server: FakeVLLM) -> None:
    server.failing = {"GET /v1/models"}
    with pytest.raises(EngineStartError, match="status 503") as caught:
        async with core_of(server):
            raise AssertionError("it started")
    assert not isinstance(caught.value, EngineConfigError)


async def test_a_key_is_read_from_its_file(socket_dir: Path) -> None:
    file = socket_dir / "key"
    file.write_text("secret\n")
    async with FakeVLLM(key="secret") as server:
        async with engine_of(socket_dir, server, remote_vllm_key_file=file) as host, Peer(host.address) as peer:
            await peer.send(make_add(1, PROMPT, 2))
            assert (await peer.read_until_finished([1])).token_ids[1] == expected(2)
        file.write_text("two\nkeys")
        with pytest.raises(InvalidArgument, match="must hold one key"):
            async with engine_of(socket_dir, server, remote_vllm_key_file=file):
                raise AssertionError("it started")


async def _outputs_for_ever(core: VLLMCore) -> None:
    while True:
        await core.get_output()


@asynccontextmanager
async def core_of(server: FakeVLLM) -> AsyncIterator[VLLMCore]:
    config = EngineConfig(worker=WorkerConfig(model=str(DEMO_MODEL)))
    core = VLLMCore(VLLMServer(server.url), config, VOCAB_SIZE)
    try:
        await core.start()
        yield core
    finally:
        await core.close()


async def test_another_server_in_its_place_ends_the_engine(server: FakeVLLM) -> None:
    async with core_of(server) as core:
        assert await core.call_utility("check_health") is None
        server.version = "0.33.0"
        await core.call_utility("check_health")
        with pytest.raises(EngineDeadError, match="another vLLM answers"):
            await core.get_output()


async def test_a_server_whose_metrics_fail_is_no_other(server: FakeVLLM) -> None:
    async with core_of(server) as core:
        server.failing = {"GET /metrics"}
        assert await core.call_utility("check_health") is None
        await core.add_request(EngineCoreRequest("1", PROMPT, CoreSamplingParams(max_tokens=1, seed=1)))


@pytest.mark.parametrize("is_resumed_at_once", [True, False])
async def test_a_pause_that_ends_early_loses_no_request(server: FakeVLLM, *, is_resumed_at_once: bool) -> None:
    server.after = 1
    async with core_of(server) as core:
        for name in ("1", "2", "3"):
            await core.add_request(EngineCoreRequest(name, PROMPT, CoreSamplingParams(max_tokens=4, seed=1)))
        await until(lambda: server.num_open == 3)
        pause = asyncio.ensure_future(core.call_utility("pause", "keep", False))
        await asyncio.sleep(0)
        if is_resumed_at_once:
            await core.call_utility("resume")
        pause.cancel()
        await asyncio.wait([pause])
        await core.abort_requests(["2"])
        await core.call_utility("resume")
        await until(lambda: server.num_open == 2)
        server.go.set()
        tokens: dict[str, list[int]] = {"1": [], "2": [], "3": []}
        async with asyncio.timeout(30):
            while len(tokens["1"]) + len(tokens["3"]) < 8:
                for output in (await core.get_output()).outputs:
                    tokens[output.request_id] += output.new_token_ids
        assert tokens["1"] == tokens["3"] == expected(4)
        assert len(tokens["2"]) <= 1, "it was aborted"


async def test_a_server_that_is_not_well_gets_no_requests_and_may_recover(server: FakeVLLM) -> None:
    async with core_of(server) as core:
        server.is_well = False
        with pytest.raises(UtilityError, match="its engine failed"):
            await core.call_utility("check_health")
        server.is_well = True
        assert await core.call_utility("check_health") is None


async def test_a_server_that_falls_silent_is_lost(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_core, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(vllm_core, "SILENT_SECONDS", 0.01)
    async with core_of(server) as core:
        server.after, server.is_well = 0, False
        params = CoreSamplingParams(max_tokens=3, seed=1)
        await core.add_request(EngineCoreRequest("1", PROMPT, params))
        with pytest.raises(EngineDeadError, match="it has fallen silent"):
            await _outputs_for_ever(core)


async def test_calls_that_are_the_server_s_own_are_refused_by_name(server: FakeVLLM) -> None:
    async with core_of(server) as core:
        with pytest.raises(UtilityError, match="reload_weights: vLLM computes"):
            await core.call_utility("reload_weights", "/tmp")


async def test_a_packed_prompt_reaches_the_server_as_a_list(server: FakeVLLM) -> None:
    packed = np.array(PROMPT, "<u4").tobytes()
    async with core_of(server) as core:
        params = CoreSamplingParams(max_tokens=3, seed=1, temperature=0.0)
        for name, accepted in (("1", []), ("2", expected(2)), ("3", expected(3))):
            await core.add_request(
                EngineCoreRequest(name, [], params, packed_prompt=packed, accepted_token_ids=accepted)
            )
        ended: dict[str, EngineCoreOutput] = {}
        while len(ended) < 3:
            outputs = (await core.get_output()).outputs
            ended |= {each.request_id: each for each in outputs if each.finish_reason is not None}
        assert [body["token_ids"] for body in server.bodies] == [PROMPT, PROMPT + expected(2)]
        assert {each.finish_reason for each in ended.values()} == {FinishReason.LENGTH}


async def test_steps_are_those_of_the_server(server: FakeVLLM) -> None:
    async with core_of(server) as core:
        params = CoreSamplingParams(max_tokens=6, seed=1, temperature=0.0)
        for name in ("1", "2", "3"):
            await core.add_request(EngineCoreRequest(name, PROMPT, params))
        step, num_tokens, stats = 0, 0, SchedulerStats()
        while num_tokens < 18:
            outputs = await core.get_output()
            step, stats = outputs.step, outputs.scheduler_stats or stats
            num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
        assert 6 <= step < 18, "each step gives several requests a token"
        assert (stats.num_prefilled_requests, stats.num_prefilled_tokens) == (3, 9)
        assert stats.num_computed_tokens == 27
        await until(lambda: server.num_open == 0)
        assert (await core.get_output()).scheduler_stats == replace(
            stats, num_running=0, num_free_blocks=512, kv_usage=0
        )
