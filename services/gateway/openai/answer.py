"""What an answer needs of its generation, whichever endpoint shapes it."""

import time
from collections.abc import Iterator
from typing import Protocol

from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..generation.generation import Generation
from ..generation.job import Job
from ..http import sse
from ..mesh.collector import Delta
from ..metrics import FINISH_REASONS
from .openai_logprobs import Position, positions, prompt_object
from .openai_models import Body, Options


class Answer(Protocol):
    """Shapes one response: events while it streams, or one object at its end."""

    def first_events(self) -> bytes:
        """Before any output."""

    def events(self, delta: Delta) -> bytes:
        """For some output; empty when there is nothing to tell."""

    def last_events(self) -> bytes:
        """After all output, without ``[DONE]``."""

    def add(self, delta: Delta) -> None:
        """Keeps some output for :meth:`body`."""

    def body(self) -> bytes:
        """The whole JSON response."""


class Api(Protocol):
    """One endpoint: how it reads bodies and shapes answers."""

    def read(self, body: Body) -> tuple[Job, Options]:
        """What the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""

    def answer(self, generation: Generation, options: Options) -> Answer: ...


class AnswerBase:
    """Fields of the generation in OpenAI's spelling; an answer holds one."""

    def __init__(self, generation: Generation, options: Options, prefix: str, model: str) -> None:
        self.generation = generation
        self.options = options
        self.id = f"{prefix}-{generation.request_id}"
        self.model = model
        self.created = int(time.time())

    def writer(self, object_name: str) -> sse.EventWriter:
        return sse.EventWriter(self.id, object_name, self.created, self.model, usage_is_null=self.options.include_usage)

    def head(self, object_name: str) -> dict[str, object]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def tail(self) -> dict[str, object]:
        """Usage, and the timeline when asked for."""
        members: dict[str, object] = {"usage": sse.usage_object(self.usage)}
        return members | self.timeline()

    def timeline(self) -> dict[str, object]:
        if not self.options.return_timeline:
            return {}
        return {"timeline": sse.timeline_object(self.generation.timeline, self.generation.total_ns)}

    @property
    def usage(self) -> inference_pb2.Usage:
        usage = self.generation.usage
        if self.options.echo_only:
            usage.completion_tokens = 0
        return usage

    def usage_of(self, index: int) -> inference_pb2.Usage | None:
        """For continuous usage: the prompt's own, so far."""
        if not self.options.continuous_usage:
            return None
        return inference_pb2.Usage(
            prompt_tokens=len(self.generation.prompt_of(index)),
            completion_tokens=self.generation.completion_tokens[index],
        )

    @property
    def tells_all(self) -> bool:
        """Whether an event without text may be worth sending."""
        options = self.options
        return options.return_token_ids or options.continuous_usage or options.num_logprobs is not None

    def positions(self, delta: Delta) -> Iterator[Position]:
        """What is told of a delta's tokens."""
        return positions(delta.logprobs, delta.token_ids, delta.token_index, self.options.num_logprobs or 0)

    def prompt_positions(self, index: int) -> Iterator[Position]:
        """What is told of an output's prompt, from its second token on."""
        told = self.generation.prompt_logprobs[index // self.generation.num_samples]
        top = told[0].logprobs.top if told else 0
        return positions(told, self.generation.prompt_of(index), 0, top)

    def prompt_logprobs(self, index: int) -> dict[str, object]:
        """As vLLM has them, when the client asked for them under that name."""
        if self.options.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_object(self.prompt_positions(index))}

    def stop_reason(self, finished: output_processor_pb2.RequestFinished) -> str | int | None:
        """The client's stop string or stop token id that matched; None at an end of sequence."""
        reason = finished.stop_reason
        if reason in self.options.stop:
            return reason
        return int(reason) if reason.isdecimal() and int(reason) in self.options.stop_token_ids else None


def finish_reason(finished: output_processor_pb2.RequestFinished) -> str:
    return FINISH_REASONS[finished.reason]
