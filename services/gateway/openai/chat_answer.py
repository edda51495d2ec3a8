"""What ``/v1/chat/completions`` answers."""

from tokenloom.v1 import output_processor_pb2

from ..assistant.parsed_message import ParsedMessage
from ..http import sse
from ..mesh.collector import Delta
from .answer import AnswerBase, finish_reason
from .openai_logprobs import chat_content
from .openai_message import AssistantMessage


class ChatAnswer:
    """A conversation's next turn, in one sample or several."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer("chat.completion.chunk")
        samples = range(base.generation.num_samples)
        self._live = len(samples)
        self._messages = [self._message() for _ in samples]
        self._token_ids: list[list[int]] = [[] for _ in samples]
        self._logprobs: list[list[dict[str, object]]] = [[] for _ in samples]
        self._tells_all = base.tells_all or base.options.plan is not None
        self._text_events = [self._writer.text_event(index, b'"delta":{"content":', b"}") for index in samples]

    def first_events(self) -> bytes:
        extra = b""
        if self._base.options.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[0]))
        events = b""
        for index in range(len(self._messages)):
            role = sse.choice(index, b'"delta":{"role":"assistant","content":""}')
            events += self._writer.event(role, extra, self._base.usage_of(index))
        return events

    def events(self, delta: Delta) -> bytes:
        index = delta.index
        if delta.finished is None and not self._tells_all:
            return self._text_events[index](delta.text) if delta.text else b""
        events = b""
        turn = self._messages[index].feed(delta.text, ends=delta.finished is not None)
        if any(turn.values()) or (self._base.tells_all and delta.token_ids):
            ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
            content = b'"delta":%b' % sse.encode_json(turn)
            told = sse.encode_json(_logprobs(self._content(delta))) if delta.logprobs else b"null"
            choice = sse.choice(index, content, extra=ids, logprobs=told)
            events = self._writer.event(choice, usage=self._base.usage_of(index))
        if delta.finished is not None:
            self._live -= 1
            finish = sse.encode_json(self._finish_reason(index, delta.finished))
            stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            choice = sse.choice(index, b'"delta":{}', finish, stop)
            is_last = self._live == 0 and not self._base.options.include_usage
            timeline = sse.members(self._base.timeline()) if is_last else b""
            events += self._writer.event(choice, timeline, self._base.usage_of(index))
        return events

    def last_events(self) -> bytes:
        if not self._base.options.include_usage:
            return b""
        return self._writer.event(b"", sse.members(self._base.timeline()), self._base.usage)

    def add(self, delta: Delta) -> None:
        self._messages[delta.index].feed(delta.text, ends=delta.finished is not None)
        self._token_ids[delta.index] += delta.token_ids
        if delta.logprobs:
            self._logprobs[delta.index] += self._content(delta)

    def body(self) -> bytes:
        choices = [self._choice(index) for index in range(len(self._messages))]
        response = self._base.head("chat.completion") | {"choices": choices} | self._base.prompt_logprobs(0)
        if self._base.options.return_token_ids:
            response["prompt_token_ids"] = list(self._base.generation.prompts[0])
        return sse.encode_json(response | self._base.tail())

    def _choice(self, index: int) -> dict[str, object]:
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "message": self._messages[index].whole(),
            "logprobs": None if self._base.options.num_logprobs is None else _logprobs(self._logprobs[index]),
            "finish_reason": self._finish_reason(index, finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice

    def _message(self) -> AssistantMessage:
        plan, is_open = self._base.options.plan, self._base.generation.opens_reasoning
        return AssistantMessage(None if plan is None else ParsedMessage(plan, reasoning_is_open=is_open))

    def _finish_reason(self, index: int, finished: output_processor_pb2.RequestFinished) -> str:
        """An output that came to its end by itself, and calls tools, ends with them."""
        reason = finish_reason(finished)
        return "tool_calls" if reason == "stop" and self._messages[index].has_calls else reason

    def _content(self, delta: Delta) -> list[dict[str, object]]:
        return chat_content(self._base.positions(delta), as_ids=self._base.options.tokens_as_ids)


def _logprobs(content: list[dict[str, object]]) -> dict[str, object]:
    return {"content": content, "refusal": None}
