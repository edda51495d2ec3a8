"""Cut a streamed answer at any event and resume it: both parts together are the answer that was not cut."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.gateway.openai.joined import join_events
from tokenloom.request import errors
from tokenloom.request.reasoning import reasoning_format
from tokenloom.request.tool_format import FORMATS, REQUIRED
from tokenloom.services.gateway.anthropic.message_answer import MessageAnswer, MessageReports
from tokenloom.services.gateway.assistant.message_plans import MessagePlan
from tokenloom.services.gateway.endpoints.generation_endpoint import shaped_again
from tokenloom.services.gateway.formats.call_parser import new_call_id, open_parser
from tokenloom.services.gateway.formats.strict_calls import NamedCall
from tokenloom.services.gateway.formats.think import opener
from tokenloom.services.gateway.formats.tool_request import Tool
from tokenloom.services.gateway.generation.delivered import Delivered
from tokenloom.services.gateway.mesh.collector import Delta
from tokenloom.services.gateway.openai.answer import AnswerBase
from tokenloom.services.gateway.openai.body_reader import AnswerOptions
from tokenloom.services.gateway.openai.chat import ChatAnswer
from tokenloom.services.gateway.openai.completions import CompletionAnswer
from tokenloom.services.gateway.openai.event_ids import (
    MANY_CHARS,
    EventId,
    NumberedAnswer,
    NumberedEvent,
    parse_event_id,
    parse_numbered_id,
)
from tokenloom.services.gateway.openai.token_generation import TokensAnswer
from tokenloom.services.gateway.openapi.token_schemas import TokenGenerationRequest
from tokenloom.services.gateway.responses.response_answer import ResponseAnswer, ResponseRequest
from tokenloom.services.gateway.responses.response_store import ResponseStore
from tokenloom.v1 import inference_pb2
from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs
from tokenloom.v1.types_pb2 import FinishReason, Logprobs

REQUEST_ID = "0123456789abcdef" * 2 + "89abcdef"
PLAIN = AnswerOptions(
    stream=True,
    include_usage=False,
    continuous_usage=False,
    return_token_ids=False,
    return_timeline=False,
    stop=(),
    stop_token_ids=frozenset(),
    event_ids=True,
)
CALL = '{"name": "add", "arguments": {"a": 1, "b": "}]\\"x"}}'
TEXTS = [
    "plain text, naïve 日本 😀\n",
    f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> done",
    "<think>First, 1 < 2.\nThen</think>\n\nthe answer </thin",
    '[{"name": "add", "parameters": {"a": 1}}, {"name": "f", "parameters": {"é": [1, 2]}}]',
    '[TOOL_CALLS]add[ARGS]{"a": {}}',
    '{"name": "f", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
    "",
]
TOOLS = [Tool(name, {}, {}) for name in ("add", "f")]
PLANS: dict[str, MessagePlan | None] = {
    "none": None,
    **{
        name: MessagePlan(partial(open_parser, form, TOOLS), new_call_id=lambda name, random: "id")
        for name, form in FORMATS.items()
    },
    "required": MessagePlan(partial(open_parser, REQUIRED, TOOLS), new_call_id=lambda name, random: "id"),
    "named": MessagePlan(partial(NamedCall, "f"), new_call_id=lambda name, random: "id"),
}
THINK = reasoning_format("qwen3", "")
NEW_EVENT = NumberedEvent(created=1)


def plan_of(name: str, *, reasons: bool) -> MessagePlan | None:
    plan = PLANS[name]
    if not reasons:
        return plan
    assert THINK is not None
    return replace(plan or MessagePlan(), open_reasoning=opener(THINK))


class FakeGeneration(SimpleNamespace):
    """What an answer reads of a generation."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__(
            request_id=REQUEST_ID,
            num_samples=num_outputs,
            num_outputs=num_outputs,
            prompts=[[7, 8]],
            prompt_texts=["the prompt"],
            prompt_logprobs={0: [prompt_logprobs()]},
            opens_reasoning=False,
            may_reason=True,
            stop_token_ids=(),
            reasoning=None,
            completion_tokens=[0] * num_outputs,
            finished={},
            usage=inference_pb2.Usage(prompt_tokens=2, completion_tokens=5),
            model="model",
            turn=None,
        )

    def prompt_of(self, index: int) -> Sequence[int]:
        return [7, 8]


def prompt_logprobs() -> SlotTextLogprobs:
    columns = Logprobs(sampled=[-1.0], rank=[1])
    return SlotTextLogprobs(prompt=True, token_index=1, logprobs=columns, sampled_text=[b"t"], first_text=b"p")


def deltas_of(texts: Sequence[str], sizes: Sequence[int], *, logprobs: bool, ends_alone: bool) -> list[Delta]:
    """Cut texts, of which each character is a token, into deltas of these sizes, in turn; outputs take turns."""
    deltas, at, turn = list[Delta](), [0] * len(texts), 0
    finished = [False] * len(texts)
    while not all(finished):
        for index, text in enumerate(texts):
            if finished[index]:
                continue
            start, size = at[index], sizes[turn % len(sizes)]
            turn += 1
            at[index] = min(start + size, len(text))
            ids = [ord(char) for char in text[start : at[index]]]
            is_end = at[index] == len(text) and not (ends_alone and start < len(text))
            finished[index] = is_end
            end = RequestFinished(reason=FinishReason.FINISH_REASON_STOP, completion_tokens=len(text))
            delta = Delta(index, start, text[start : at[index]], ids, end if is_end else None)
            if logprobs and ids:
                delta.logprobs = [columns_of(start, ids)]
            deltas.append(delta)
    return deltas


def columns_of(start: int, ids: Sequence[int]) -> SlotTextLogprobs:
    texts = [chr(each).encode() for each in ids]
    columns = Logprobs(
        sampled=[-float(i) for i in ids], rank=[1] * len(ids), top=1, token_id=ids, logprob=[-0.5] * len(ids)
    )
    return SlotTextLogprobs(token_index=start, logprobs=columns, sampled_text=texts, token_text=texts)


def stream(
    kind: type[ChatAnswer | CompletionAnswer | TokensAnswer], options: AnswerOptions, deltas: Sequence[Delta], num: int
) -> list[str]:
    """Return the events as a gateway writes them."""
    base = AnswerBase(FakeGeneration(num), options, "x", "model", "chunk")  # type: ignore[arg-type]
    answer = kind(base)
    body = answer.first_events()
    delivered = Delivered({} if options.resumed is None else options.resumed.positions)
    for delta in deltas:
        for part, is_new in delivered.cut(delta):
            if is_new:
                body += answer.events(part)
            else:
                answer.repeat(part)
    body += answer.last_events()
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return events


def id_of(event: str) -> str:
    line, data = event.split("\n")
    assert data.startswith("data: ")
    return line.removeprefix("id: ")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_cut_at_any_event_loses_and_repeats_nothing(data: st.DataObject) -> None:
    draw = data.draw
    kind: Any = draw(st.sampled_from([ChatAnswer, CompletionAnswer, TokensAnswer]))
    texts = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3))
    options = replace(
        PLAIN,
        include_usage=draw(st.booleans()),
        return_token_ids=draw(st.booleans()),
        num_logprobs=draw(st.sampled_from([None, 1])),
    )
    if kind is ChatAnswer:
        options = replace(options, plan=plan_of(draw(st.sampled_from(sorted(PLANS))), reasons=draw(st.booleans())))
    elif kind is TokensAnswer:
        mode, wants_prompt = draw(st.sampled_from(["tokens", "text"])), draw(st.booleans())
        fields = TokenGenerationRequest(
            token_ids=[7], sampling_params={}, output_mode=mode, return_token_ids=wants_prompt
        )
        options = replace(options, request=fields)
    else:
        options = replace(options, echo=draw(st.booleans()))
    pieces = st.lists(st.integers(1, 12), min_size=1, max_size=8)
    chunked = partial(deltas_of, texts, logprobs=options.num_logprobs is not None)
    num = len(texts)
    whole = stream(kind, options, chunked(sizes=draw(pieces), ends_alone=draw(st.booleans())), num)
    events, had = whole, list[str]()
    for _ in range(draw(st.integers(1, 3))):  # a stream may break again
        if not events:
            break
        had += events[: draw(st.integers(1, len(events)))]
        resumed = parse_event_id(id_of(had[-1]))
        deltas = chunked(sizes=draw(pieces), ends_alone=draw(st.booleans()))
        events = stream(kind, replace(options, resumed=resumed), deltas, num)
    assert join_events(had + events) == join_events(whole)
    if kind is TokensAnswer:
        assert sum("prompt_token_ids" in event for event in had + events) == wants_prompt


def numbered(kind: str, plan: MessagePlan | None, deltas: Sequence[Delta], event: NumberedEvent) -> list[str]:
    """Return the events of an API that numbers them, after one that the client has."""
    generation: Any = FakeGeneration(1)
    generation.finished[0] = RequestFinished(reason=FinishReason.FINISH_REASON_STOP, completion_tokens=5)
    options = shaped_again(replace(PLAIN, plan=plan), REQUEST_ID)
    answer: MessageAnswer | ResponseAnswer
    if kind == "messages":
        answer = MessageAnswer(generation, replace(options, request=MessageReports()))
    else:
        request = ResponseRequest("resp_1", 1, {}, [], "", "a", is_background=False, is_stored=False, namespaced={})
        answer = ResponseAnswer(generation, options, request, ResponseStore(0))
    shaper = NumberedAnswer(answer, REQUEST_ID, event)
    body = shaper.first_events() + b"".join(map(shaper.events, deltas)) + shaper.last_events()
    *events, rest = body.decode().split("\n\n")
    assert not rest
    return events


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_numbered_events_are_the_same_whenever_an_answer_is_shaped(data: st.DataObject) -> None:
    draw = data.draw
    kind, text, name = (draw(st.sampled_from(each)) for each in (["messages", "responses"], TEXTS, sorted(FORMATS)))
    form = FORMATS[name]
    plan = MessagePlan(partial(open_parser, form, TOOLS), new_call_id=partial(new_call_id, form))
    pieces = st.lists(st.integers(1, 12), min_size=1, max_size=8)

    def deltas() -> list[Delta]:
        return deltas_of([text], draw(pieces), logprobs=False, ends_alone=draw(st.booleans()))

    whole = numbered(kind, plan, deltas(), NEW_EVENT)
    num_received = draw(st.integers(1, len(whole)))
    last = parse_numbered_id(whole[num_received - 1].split("\n")[0].removeprefix("id: "))
    assert (last.request_id, last.created, last.number) == (REQUEST_ID, 1, num_received)
    rest = numbered(kind, plan, deltas(), last)
    # An id also says how many tokens have come, which depends on how they came.
    assert list(map(without_tokens, whole[:num_received] + rest)) == list(map(without_tokens, whole))


def without_tokens(event: str) -> str:
    line, _, content = event.partition("\n")
    return f"{line.partition('-')[0]}\n{content}"


def test_a_large_delta_is_shaped_in_steps() -> None:
    text = "word " * 3 * MANY_CHARS
    (delta,) = deltas_of([text], [len(text)], logprobs=False, ends_alone=False)
    generation: Any = FakeGeneration(1)
    generation.finished[0] = delta.finished
    shaper = NumberedAnswer(MessageAnswer(generation, replace(PLAIN, request=MessageReports())), REQUEST_ID, NEW_EVENT)
    assert shaper.is_large(delta)
    assert sum(1 for _ in shaper.shape(delta)) > 3 * MANY_CHARS
    assert shaper.events(delta).count(b"content_block_delta") > 3 * MANY_CHARS
    assert not shaper.is_large(Delta(0, 0, "word"))


def test_an_answer_with_fewer_events_than_the_client_has_is_lost() -> None:
    deltas = deltas_of(["short"], [2], logprobs=False, ends_alone=False)
    with pytest.raises(errors.RequestLost):
        numbered("messages", None, deltas, NumberedEvent(REQUEST_ID, 1, 50))


def test_an_answer_that_is_shorter_than_the_position_is_lost() -> None:
    resumed = EventId(REQUEST_ID, 1, {0: "9-9"})
    with pytest.raises(errors.RequestLost):
        stream(
            ChatAnswer, replace(PLAIN, resumed=resumed), deltas_of(["short"], [2], logprobs=False, ends_alone=False), 1
        )


@pytest.mark.parametrize(
    "text",
    ["1", f"{REQUEST_ID}.1.1-1", f"{REQUEST_ID}.1.n1", f"{REQUEST_ID}.1.n1-2.u", f"{REQUEST_ID}.1.n-1-2", "n1-2"],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refusal:
        parse_numbered_id(text)
    assert refusal.value.field == "Last-Event-ID"


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "x" * 5000,
        REQUEST_ID,
        f"{REQUEST_ID}.1",
        f"{REQUEST_ID}.1.2",
        f"{REQUEST_ID}.1.1-1.x",
        f"{REQUEST_ID}.1.1-1-1",
        f"{REQUEST_ID.upper()}.1.1-1",
        f"{REQUEST_ID}.1.{'_' * 64}",
        f"{REQUEST_ID}.-1.1-1",
        f"{REQUEST_ID}.1.1-1\n",
        f"{REQUEST_ID}.1.1-٣",
        f"chatcmpl-{REQUEST_ID}.1.1-1",
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refusal:
        parse_event_id(text)
    assert refusal.value.field == "Last-Event-ID"


def test_an_id_names_the_position_of_each_output() -> None:
    event = parse_event_id(f"{REQUEST_ID}.a.3-4__0-0e_5-6f.u")
    assert (event.request_id, event.created, event.usage_sent) == (REQUEST_ID, 10, True)
    positions = {index: (each.num_tokens, each.num_chars, each.finished) for index, each in event.positions.items()}
    assert positions == {0: (3, 4, False), 2: (0, 0, False), 3: (5, 6, True)}


def test_events_have_ids_only_for_clients_that_ask() -> None:
    deltas = deltas_of(["some text"], [3], logprobs=False, ends_alone=False)
    for event in stream(ChatAnswer, replace(PLAIN, event_ids=False), deltas, 1):
        assert re.fullmatch("data: .*", event)
        json.loads(event.removeprefix("data: "))


def test_many_outputs_have_no_ids() -> None:
    texts: list[Any] = ["a"] * 65
    events = stream(CompletionAnswer, PLAIN, deltas_of(texts, [3], logprobs=False, ends_alone=False), 65)
    assert all(event.startswith("data: ") for event in events)
