"""Reads a generation for answers: what chats and completions have in common."""

import base64
import time
from collections.abc import Iterable, Iterator

from tokenloom.request.routed_rows import to_npy
from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..encoding import sse
from ..encoding.sse import joined
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..metrics.gateway_metrics import FINISH_REASONS
from .body_reader import AnswerOptions
from .event_ids import CONTENT_ENDED, MAX_OUTPUTS, EventIds
from .openai_logprobs import TokenPosition, positions, prompt_entries

VALUES_PER_STEP = 512
"""Log probabilities that are shaped at a time, less than a millisecond."""
MANY_PARTS = 64
"""Log probabilities of more tokens are shaped in steps before the event that holds them."""


class AnswerBase:
    """Reads a generation in OpenAI's spelling; an answer holds one.

    Attributes:
        has_details: Whether an event without text may be worth sending.
        writer: Makes the events of the stream.
        ids: Makes the ids of the events; None: the client did not ask for them.
        resumed: What the client has of the answer, if it resumes it.
    """

    def __init__(
        self, generation: RunningGeneration, options: AnswerOptions, prefix: str, model: str, event_name: str
    ) -> None:
        """Args:
        prefix: Begins the answer's id.
        event_name: The ``object`` of the stream's events.
        """
        self.generation = generation
        self.options = options
        self.has_details = options.return_token_ids or options.continuous_usage or options.num_logprobs is not None
        self._id = f"{prefix}-{generation.request_id}"
        self._model = model
        self.resumed = options.resumed
        self._created = int(time.time()) if self.resumed is None else self.resumed.created
        self.ids: EventIds | None = None
        if options.event_ids and generation.num_outputs <= MAX_OUTPUTS:
            self.ids = EventIds(generation.request_id, self._created, generation.num_outputs)
            for index in () if self.resumed is None else self.resumed.entries:
                self.repeated(index)
        self.writer = sse.EventWriter(self._id, event_name, self._created, model, usage_is_null=options.include_usage)

    def head(self, object_name: str) -> dict[str, object]:
        return {"id": self._id, "object": object_name, "created": self._created, "model": self._model}

    def tail(self) -> dict[str, object]:
        """Return the usage, and the timeline when asked for."""
        members: dict[str, object] = {"usage": sse.usage_object(self.usage)}
        return members | self.timeline()

    def last_events(self) -> bytes:
        """Return the event that holds the usage, when asked for."""
        if not self.options.include_usage or (self.resumed is not None and self.resumed.usage_sent):
            return b""
        line = b"" if self.ids is None else self.ids.last_line()
        return line + self.writer.event(b"", sse.members(self.timeline()), self.usage)

    def repeated(self, index: int) -> None:
        """Take note that output which the client has was shaped once more."""
        if self.ids is not None and self.resumed is not None:
            self.ids.restore(self.resumed, index)

    def has_begun(self, index: int) -> bool:
        """Return whether the client of a resumed answer has an event of an output."""
        return self.resumed is not None and index in self.resumed.entries

    def has_content(self, index: int) -> bool:
        """Return whether the client of a resumed answer has all content of an output."""
        return self.resumed is not None and self.resumed.entries.get(index, "").endswith(CONTENT_ENDED)

    def timeline(self) -> dict[str, object]:
        if not self.options.return_timeline:
            return {}
        return {"timeline": sse.timeline_object(self.generation.timeline, self.generation.total_ns)}

    @property
    def usage(self) -> inference_pb2.Usage:
        usage = self.generation.usage
        if self.options.echo_only:
            usage.completion_tokens = 0
            usage.ClearField("reasoning_tokens")
        return usage

    def usage_of(self, index: int) -> inference_pb2.Usage | None:
        """Return one output's own usage so far, when every event is to hold it."""
        if not self.options.continuous_usage:
            return None
        reasoning = self.generation.reasoning
        return inference_pb2.Usage(
            prompt_tokens=len(self.generation.prompt_of(index)),
            completion_tokens=self.generation.completion_tokens[index],
            reasoning_tokens=None if reasoning is None else reasoning.num_tokens(index),
        )

    def positions(self, delta: Delta) -> Iterator[TokenPosition]:
        """Return the log probabilities of a delta's tokens."""
        return positions(delta.logprobs, delta.token_ids, delta.token_index, self.options.num_logprobs or 0)

    def prompt_positions(self, index: int) -> Iterator[TokenPosition]:
        """Return the log probabilities of an output's prompt, from its second token on."""
        parts = self.generation.prompt_logprobs[index // self.generation.num_samples]
        top = parts[0].logprobs.top if parts else 0
        return positions(parts, self.generation.prompt_of(index), 0, top)

    def prompt_logprobs(self, index: int) -> Iterator[bytes]:
        """Return the same in vLLM's form as a member, with a comma before it; nothing unless the client asked for
        ``prompt_logprobs``."""
        if self.options.num_prompt_logprobs is not None:
            yield b',"prompt_logprobs":['
            yield from joined(prompt_entries(self.prompt_positions(index)))
            yield b"]"

    @property
    def is_plain(self) -> bool:
        """Whether the whole response has neither log probabilities nor many outputs, and is written at once."""
        options = self.options
        return options.num_logprobs is None and options.num_prompt_logprobs is None and self.generation.num_outputs <= 4

    def plain_body(self, object_name: str, choices: list[dict[str, object]], own: dict[str, object]) -> bytes:
        """Return the whole JSON response. ``own``: members after the choices."""
        return sse.encode_json(self.head(object_name) | {"choices": choices} | own | self.tail())

    def body(self, object_name: str, choices: Iterable[Iterator[bytes]], own: Iterable[bytes]) -> Iterator[bytes]:
        """Return the whole JSON response in blocks. ``own``: members after the choices, with a comma before each."""
        yield sse.encode_json(self.head(object_name))[:-1] + b',"choices":['
        is_first = True
        for blocks in choices:
            if not is_first:
                yield b","
            is_first = False
            yield from blocks
        yield b"]"
        yield from own
        yield sse.members(self.tail()) + b"}"

    def stop_reason(self, finished: output_processor_pb2.RequestFinished) -> str | int | None:
        """Return the client's stop string or stop token id that matched; None at an end of sequence."""
        reason = finished.stop_reason
        if reason in self.options.stop:
            return reason
        return int(reason) if reason.isdecimal() and int(reason) in self.options.stop_token_ids else None


def routed_member(finished: output_processor_pb2.RequestFinished) -> dict[str, object]:
    """Return the experts of an output's tokens as a member, a ``.npy`` file in base64; empty unless there are any."""
    if not finished.HasField("routed_experts"):
        return {}
    return {"routed_experts": base64.b64encode(to_npy(finished.routed_experts)).decode()}


def choice_blocks(choice: dict[str, object], logprobs: Iterator[bytes]) -> Iterator[bytes]:
    """Return the JSON of a choice in blocks, without the closing brace. ``logprobs``: their JSON in blocks."""
    names = list(choice)
    after = names.index("logprobs")
    yield sse.encode_json({name: choice[name] for name in names[:after]})[:-1] + b',"logprobs":'
    yield from logprobs if choice["logprobs"] is not None else (b"null",)
    yield sse.members({name: choice[name] for name in names[after + 1 :]})


def finish_reason(finished: output_processor_pb2.RequestFinished) -> str:
    return FINISH_REASONS[finished.reason]
