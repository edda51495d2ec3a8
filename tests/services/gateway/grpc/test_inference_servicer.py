"""The public gRPC API."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import EOS, MODEL, FakeMesh
from tokenloom.request import errors, packed_ids, wire_errors
from tokenloom.services.gateway import service
from tokenloom.v1 import inference_pb2, output_processor_pb2, types_pb2


async def test_a_stream_of_text_and_tokens(mesh: FakeMesh) -> None:
    request = inference_pb2.GenerateRequest(
        model=MODEL, text="abc", stop=["END"], user_request_id="mine", return_timeline=True
    )
    async with mesh.inference() as stub:
        call = stub.Generate(request)
        submitted = await mesh.outputs.next_request()
        assert bytes(submitted.submit.prompt.token_ids) == b"abc"
        assert submitted.submit.sampling_params.max_tokens == 16
        assert list(submitted.submit.sampling_params.stop_token_ids) == [EOS]
        assert submitted.submit.text.stop == ["END"]
        assert "mine" not in submitted.submit.request_id
        submitted.answer("Hi", " you", stop_reason="END")
        responses = [response async for response in call]
        metadata = dict(await call.initial_metadata() or ())
    assert metadata["x-request-id"] == "mine"
    assert "".join(response.text for response in responses) == "Hi you"
    assert [i for response in responses for i in response.token_ids] == list(b"Hi you")
    starts = [response.token_index for response in responses]
    assert starts[0] == 0
    last = responses[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.stop_reason == "END"
    assert last.usage == inference_pb2.Usage(prompt_tokens=3, completion_tokens=6, cached_tokens=1)
    assert last.timeline.queued_ns == 2_000_000
    assert last.timeline.tokenize_ns > 0


async def test_a_deadline_for_the_first_token_is_promised_or_refused(mesh: FakeMesh) -> None:
    request = inference_pb2.GenerateRequest(text="abc", ttft_deadline=duration_pb2.Duration(nanos=50_000_000))
    search = inference_pb2.GenerateRequest(text="abc", n=2, beam_search=inference_pb2.BeamSearch())
    search.ttft_deadline.seconds = 1
    async with mesh.inference() as stub:
        for wrong in (inference_pb2.GenerateRequest(text="abc", ttft_deadline=duration_pb2.Duration()), search):
            with pytest.raises(grpc.aio.AioRpcError, match="ttft_deadline") as failed:
                await stub.Generate(wrong).read()
            assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be promised") as refused:
            await stub.Generate(request).read()
        error = wire_errors.from_rpc(refused.value)
        assert isinstance(error, errors.ResourceExhausted)
        assert error.field == "ttft_deadline"
        assert error.retry_after
        request.ttft_deadline.seconds = 30
        call = stub.Generate(request)
        (await mesh.outputs.next_request()).answer("x")
        assert "".join([response.text async for response in call]) == "x"


@pytest.mark.parametrize(("keep", "kept"), [(-1, 512 - 12), (5, 5), (0, None), (-2, None)])
async def test_a_prompt_is_truncated_to_leave_room(mesh: FakeMesh, keep: int, kept: int | None) -> None:
    request = inference_pb2.GenerateRequest(text="a" * 600, truncate_prompt_tokens=keep)
    request.sampling_params.max_tokens = 12
    async with mesh.inference() as stub:
        call = stub.Generate(request)
        if kept is None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            return
        submitted = await mesh.outputs.next_request()
        assert len(submitted.submit.prompt.token_ids) == kept
        submitted.answer("x")
        assert "".join([response.text async for response in call]) == "x"


async def test_chat_and_token_ids(mesh: FakeMesh) -> None:
    mesh.outputs.auto = ["x"]
    message = inference_pb2.ChatMessage(role="user", content="hi")
    chat = inference_pb2.GenerateRequest(model=MODEL, chat=inference_pb2.ChatPrompt(messages=[message]))
    ids = inference_pb2.GenerateRequest(model=MODEL, token_ids=types_pb2.TokenIds(ids=[1, 2]))
    async with mesh.inference() as stub:
        for request in (chat, ids):
            assert "".join([response.text async for response in stub.Generate(request)]) == "x"
    (seen,) = mesh.tokenizer.chats + mesh.second_tokenizer.chats
    assert json.loads(seen.messages_json) == [{"role": "user", "content": "hi"}]
    assert seen.add_generation_prompt


async def test_cancelling_the_call_cancels_the_request(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="abc"))
        submitted = await mesh.outputs.next_request()
        call.cancel()
        async with asyncio.timeout(30):
            await submitted.cancelled.wait()


async def test_the_calls_deadline_travels(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        for seconds in (0.3, 3.0, 30.0):  # on a busy machine the request needs longer to arrive
            call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="abc"), timeout=seconds)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not mesh.outputs.requests.empty():
                break
        submitted = await mesh.outputs.next_request()
        assert 0 < submitted.submit.timeout.ToNanoseconds() <= seconds * 1e9
        async with asyncio.timeout(30):
            await submitted.cancelled.wait()


async def test_an_error_keeps_its_code(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="abc"))
        (await mesh.outputs.next_request()).fail(errors.ResourceExhausted("full"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
    error = wire_errors.from_rpc(caught.value)
    assert isinstance(error, errors.ResourceExhausted)
    assert error.retry_after == 1.0


def chat_request(**fields: Any) -> inference_pb2.GenerateRequest:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")], **fields)
    return inference_pb2.GenerateRequest(model=MODEL, chat=chat)


TOOLS = [
    inference_pb2.Tool(function=inference_pb2.Function(name="get_weather", parameters='{"type": "object"}')),
    inference_pb2.Tool(function=inference_pb2.Function(name="get_time")),
]


async def test_calls_and_reasoning_are_separated_while_they_stream(socket_dir: Path) -> None:
    fake = FakeMesh(socket_dir)
    async with fake.gateway(tool_call_parser="hermes", reasoning_parser="qwen3") as mesh, mesh.inference() as stub:
        mesh.outputs.auto = (
            "<think>Hm.</think>I ask.\n",
            "<tool_call>\n",
            '{"name": "get_time", "arguments": {"a"',
            ": 1}}",
        )
        responses = [response async for response in stub.Generate(chat_request(tools=TOOLS))]
    assert "".join(response.reasoning for response in responses) == "Hm."
    assert "".join(response.text for response in responses) == "I ask."
    calls = [call for response in responses for call in response.tool_calls]
    assert {call.index for call in calls} == {0}
    assert calls[0].id.startswith("call_")
    assert "".join(call.id for call in calls[1:]) == ""
    assert "".join(call.function.name for call in calls) == "get_time"
    assert "".join(call.function.arguments for call in calls) == '{"a": 1}'
    assert sum(len(response.token_ids) for response in responses) == sum(map(len, mesh.outputs.auto))
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS


async def test_a_forced_call_constrains_the_output(mesh: FakeMesh) -> None:
    named = inference_pb2.ToolChoice(function="get_weather")
    async with mesh.inference() as stub:
        call = stub.Generate(chat_request(tools=TOOLS, tool_choice=named))
        submitted = await mesh.outputs.next_request()
        assert json.loads(submitted.submit.sampling_params.structured_outputs.json) == {"type": "object"}
        submitted.answer('{"a": ', reason=types_pb2.FINISH_REASON_LENGTH)
        responses = [response async for response in call]
    pieces = [piece for response in responses for piece in response.tool_calls]
    assert pieces[0].function.name == "get_weather"
    assert "".join(piece.function.arguments for piece in pieces) == '{"a": '
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH, "it was cut off"


@pytest.mark.parametrize(("is_forced", "field"), [(True, "tools"), (False, "structured_outputs")])
async def test_what_cannot_be_compiled_is_named_as_the_client_wrote_it(
    mesh: FakeMesh, is_forced: bool, field: str
) -> None:
    request = inference_pb2.GenerateRequest(model=MODEL, text="a")
    request.sampling_params.structured_outputs.json = '{"enum": []}'
    if is_forced:
        request = chat_request(tools=TOOLS, tool_choice=inference_pb2.ToolChoice(function="get_weather"))
    async with mesh.inference() as stub:
        call = stub.Generate(request)
        words = "structured_outputs: Unsatisfiable schema"
        (await mesh.outputs.next_request()).fail(errors.InvalidArgument(words, "structured_outputs"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = wire_errors.from_rpc(caught.value)
    assert (error.field, error.message) == (field, f"{field}: Unsatisfiable schema")


async def test_reasoning_may_be_left_out(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(reasoning_parser="qwen3") as mesh, mesh.inference() as stub:
        mesh.outputs.auto = ("<think>Hm.</think>Yes.",)
        responses = [response async for response in stub.Generate(chat_request(include_reasoning=False))]
        assert ("".join(response.text + response.reasoning for response in responses)) == "Yes."
        text = inference_pb2.GenerateRequest(model=MODEL, text="hi")
        told = "".join([response.text async for response in stub.Generate(text)])
        assert told == "<think>Hm.</think>Yes.", "no chat: text is text"


async def test_calls_without_a_parser_are_refused(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(chat_request(tools=TOOLS))))
    error = wire_errors.from_rpc(caught.value)
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == "tool_choice"
    assert mesh.outputs.requests.empty()


def turn(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**{"model": MODEL, **fields})


async def test_what_a_schema_loses_is_named_in_the_metadata(mesh: FakeMesh) -> None:
    constraint = types_pb2.StructuredOutputs(json='{"type": "array", "uniqueItems": true}')
    params = types_pb2.SamplingParams(structured_outputs=constraint)
    async with mesh.inference() as stub:
        call = stub.Generate(inference_pb2.GenerateRequest(text="abc", sampling_params=params))
        submitted = await mesh.outputs.next_request()
        assert submitted.submit.sampling_params.structured_outputs.json == '{"type": "array"}'
        submitted.answer("[]")
        assert "".join([response.text async for response in call]) == "[]"
        metadata = dict(await call.initial_metadata() or ())
    assert metadata["x-tokenloom-ignored"] == "structured_outputs#/uniqueItems"


async def test_what_the_schema_of_a_sessions_first_turn_loses_is_named_too(mesh: FakeMesh) -> None:
    constraint = types_pb2.StructuredOutputs(json='{"type": "array", "uniqueItems": true}')
    async with mesh.inference() as stub:
        call = stub.GenerateSession(
            iter([turn(text="abc", sampling_params=types_pb2.SamplingParams(structured_outputs=constraint))])
        )
        (await mesh.outputs.next_request()).answer("[]")
        assert "".join([response.text async for response in call]) == "[]"
        metadata = dict(await call.initial_metadata() or ())
    assert metadata["x-tokenloom-ignored"] == "structured_outputs#/uniqueItems"


async def test_a_session_continues_all_that_was_said_but_the_last_token(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        call = stub.GenerateSession()
        ends = types_pb2.SamplingParams(stop_token_ids=[ord("!")])
        await call.write(turn(text="abc", user_request_id="mine", sampling_params=ends))
        await call.write(turn(token_ids=types_pb2.TokenIds(ids=list(b"de"))))  # waits for its turn
        first = await mesh.outputs.next_request()
        assert bytes(first.submit.prompt.token_ids) == b"abc"
        assert mesh.outputs.requests.empty()
        first.answer("Hi", "!")
        second = await mesh.outputs.next_request()
        assert bytes(second.submit.prompt.token_ids) == b"abcHide"
        assert not second.submit.block_hash_prefixes
        second.finish(types_pb2.FINISH_REASON_STOP)  # without a token
        await call.write(turn(text="f", return_prompt_token_ids=True))
        third = await mesh.outputs.next_request()
        assert bytes(third.submit.prompt.token_ids) == b"abcHidef"
        third.answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
        await call.done_writing()
        responses = [response async for response in call]
        assert dict(await call.initial_metadata() or ())["x-request-id"] == "mine"
    assert "".join(response.text for response in responses) == "Hi!x"
    ends = [response for response in responses if response.finish_reason]
    assert [end.usage.prompt_tokens for end in ends] == [3, 7, 8]
    assert [bytes(ids) for response in responses if (ids := response.prompt_token_ids)] == [b"abcHidef"]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "continued"),
    [
        (types_pb2.FINISH_REASON_STOP, "", "Hi}"),  # its grammar was complete
        (types_pb2.FINISH_REASON_STOP, "}", "Hi"),
        (types_pb2.FINISH_REASON_LENGTH, "", "Hi"),
        (types_pb2.FINISH_REASON_REPETITION, "", "Hi"),
    ],
)
async def test_a_session_continues_the_whole_text_of_a_grammar_without_stop_token(
    mesh: FakeMesh, reason: types_pb2.FinishReason, stop_reason: str, continued: str
) -> None:
    async with mesh.inference() as stub:
        call = stub.GenerateSession()
        await call.write(turn(text="abc"))
        first = await mesh.outputs.next_request()
        first.answer("Hi", "}", reason=reason, stop_reason=stop_reason)
        await call.write(turn(text="f"))
        second = await mesh.outputs.next_request()
        assert bytes(second.submit.prompt.token_ids) == f"abc{continued}f".encode()
        call.cancel()


async def test_a_session_that_is_left_cancels_its_turn(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        call = stub.GenerateSession()
        await call.write(turn(text="abc"))
        submitted = await mesh.outputs.next_request()
        call.cancel()
        async with asyncio.timeout(30):
            await submitted.cancelled.wait()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "prompt must be set"),
        ({"chat": inference_pb2.ChatPrompt()}, "text or token_ids, not chat"),
        ({"parts": inference_pb2.PromptParts()}, "text or token_ids, not parts"),
        ({"text": "a", "n": 2}, "n must be 1 in a session"),
        ({"text": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported in a session"),
        ({"text": "a", "model": "other"}, "other"),
        ({"text": ""}, "text is empty"),
        ({"token_ids": types_pb2.TokenIds()}, "token_ids is empty"),
        ({"token_ids": types_pb2.TokenIds(ids=[1] * 600)}, "context"),
    ],
)
async def test_an_invalid_turn_ends_the_session(mesh: FakeMesh, fields: dict[str, Any], words: str) -> None:
    mesh.outputs.auto = ["x"]
    async with mesh.inference() as stub:
        call = stub.GenerateSession()
        await call.write(turn(text="abc"))
        await call.write(turn(**fields))
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            _ = [response async for response in call]


async def test_a_session_that_says_nothing_ends_and_leaves_its_place(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_on() -> None:
        while await idle.read() is not grpc.aio.EOF:
            pass

    monkeypatch.setattr(service, "MAX_SESSIONS", 1)
    async with FakeMesh(socket_dir).gateway(request_timeout=20) as mesh, mesh.inference() as stub:
        mesh.outputs.auto = ["x"]
        for _ in range(2):
            idle = stub.GenerateSession()
            await idle.write(turn(text="abc"))
            while not (await idle.read()).finish_reason:  # a turn that has not ended has a limit of its own
                pass
            other = stub.GenerateSession()
            assert await other.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            pass_time(20)
            with pytest.raises(grpc.aio.AioRpcError, match=r"no turn arrived within 20 s") as ended:
                await read_on()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_messages_that_are_not_answered_have_a_bound_together(socket_dir: Path) -> None:
    limits = {"max_body_bytes": 100, "max_body_bytes_in_flight": 100}
    async with FakeMesh(socket_dir).gateway(**limits) as mesh, mesh.inference() as stub:
        first = stub.Generate(turn(text="a" * 60))
        request = await mesh.outputs.next_request()
        for call in (stub.Generate(turn(text="a" * 60)), stub.GenerateSession(iter([turn(text="a" * 60)]))):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        request.answer("x")
        assert [part.text async for part in first]
        mesh.outputs.auto = ["x"]
        assert [part.text async for part in stub.Generate(turn(text="a" * 60))]


TURN_ID = "ab" * 20


async def test_a_session_continues_within_a_turn_of_another_gateway(mesh: FakeMesh) -> None:
    mesh.outputs.recalled[TURN_ID] = output_processor_pb2.RecallResponse(
        prompt=types_pb2.Prompt(packed_token_ids=packed_ids.pack(list(b"abcHide")))
    )
    async with mesh.inference() as stub:
        call = stub.GenerateSession()
        has = inference_pb2.OutputPosition(num_tokens=2, text_length=2)
        position = inference_pb2.TurnPosition(request_id=TURN_ID, position=has)
        await call.write(turn(text="de", resumable=True, continued_turn=position))
        request, resume = await mesh.outputs.next_resume()
        assert resume.request_id == TURN_ID
        request.answer("Wel", "l!", reason=types_pb2.FINISH_REASON_LENGTH)
        await call.write(turn(text="f", resumable=True))
        after = await mesh.outputs.next_request()
        assert bytes(after.submit.prompt.token_ids) == b"abcHideWellf"
        after.answer("x")
        await call.done_writing()
        responses = [response async for response in call]
    assert "".join(response.text for response in responses) == "ll!x"
    assert [response.text_length for response in responses if response.finish_reason] == [5, 1]


async def test_a_turn_has_the_fingerprint_of_its_body(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        first = stub.GenerateSession()
        await first.write(turn(text="de", resumable=True))
        begun = await mesh.outputs.next_request()
        assert begun.submit.fingerprint
        mesh.outputs.recalled[TURN_ID] = output_processor_pb2.RecallResponse(prompt=begun.submit.prompt)
        second = stub.GenerateSession()
        position = inference_pb2.TurnPosition(request_id=TURN_ID)
        await second.write(turn(text="de", resumable=True, continued_turn=position))
        _, resume = await mesh.outputs.next_resume()
        assert resume.fingerprint == begun.submit.fingerprint


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"continued_turn": {"request_id": TURN_ID}}, "only a turn that was resumable"),
        ({"resumable": True, "continued_turn": {"request_id": "x"}}, "request_id must be that of the turn's answer"),
        (
            {"resumable": True, "continued_turn": {"request_id": TURN_ID, "position": {"index": 1}}},
            "index must be 0",
        ),
    ],
)
async def test_a_wrong_continuation_is_refused(mesh: FakeMesh, fields: dict[str, Any], words: str) -> None:
    async with mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await anext(aiter(stub.GenerateSession(iter([turn(text="a", **fields)]))))
        with pytest.raises(grpc.aio.AioRpcError, match="only for sessions"):
            await anext(aiter(stub.Generate(turn(text="a", continued_turn={"request_id": TURN_ID}))))


async def test_a_turn_that_nobody_knows_is_lost(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        position = inference_pb2.TurnPosition(request_id=TURN_ID)
        call = stub.GenerateSession(iter([turn(text="a", resumable=True, continued_turn=position)]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
    assert wire_errors.from_rpc(caught.value).reason == "REQUEST_LOST"


async def test_only_the_first_message_continues_a_session(mesh: FakeMesh) -> None:
    mesh.outputs.auto = ["x"]
    async with mesh.inference() as stub:
        position = inference_pb2.TurnPosition(request_id=TURN_ID)
        later = turn(text="a", resumable=True, continued_turn=position)
        call = stub.GenerateSession(iter([turn(text="a"), later]))
        with pytest.raises(grpc.aio.AioRpcError, match="only for the first message"):
            assert [response async for response in call]
