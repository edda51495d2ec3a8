"""Defines the results of the client: chunks of a stream, and whole answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenloom.offline.outputs import CompletionOutput, Logprob
from tokenloom.request.routed_rows import to_array
from tokenloom.v1 import inference_pb2, types_pb2

from .options import Message
from .tool_calls import ToolCall, ToolCallDelta, add_delta, read_delta

if TYPE_CHECKING:  # only a request for routed experts needs numpy, which a client may lack
    import numpy as np
    import numpy.typing as npt

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Model:
    """A model that requests may name."""

    name: str
    max_model_len: int
    """Limit of prompt and output tokens."""


@dataclass(frozen=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of all samples."""
    cached_tokens: int
    """Prompt tokens found in a cache."""
    reasoning_tokens: int | None = None
    """The part of ``completion_tokens`` that is reasoning; None if the server does not know the model's marks."""
    cache_write_tokens: int = 0
    """With ``keep_seconds``: prompt tokens that no cache had, and one has now."""
    cpu_ms: float | None = None
    """Milliseconds of processor time of all parts; None unless the gateway is started with ``--bill``."""


@dataclass(frozen=True)
class Chunk:
    """New output of one sample."""

    index: int
    """Number of the sample, below ``n``."""
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token a dict by token id: first the token itself, then the others. None unless requested."""
    finish_reason: str | None = None
    """In the last chunk of the sample: ``stop``, ``tool_calls``, ``length``, ``repetition`` or ``abort``."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``; None for the model's own end-of-sequence tokens."""
    usage: Usage | None = None
    """Only in the last chunk of the request."""
    reasoning: str = ""
    """In chats: the model's reasoning, which is not part of the text."""
    tool_calls: Sequence[ToolCallDelta] = ()
    """In chats: new parts of the calls that the model makes."""
    routed_experts: "npt.NDArray[np.unsignedinteger] | None" = None
    """In the last chunk of the sample, with ``return_routed_experts``: as in ``CompletionOutput``."""


@dataclass
class Output(CompletionOutput):
    """One sample; in chats, the model's next turn."""

    reasoning: str = ""
    """The model's reasoning, which is not part of the text."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """If there are any, ``finish_reason`` is ``tool_calls`` unless the output was cut off."""

    @property
    def message(self) -> Message:
        """Return this turn as a message to continue the conversation with."""
        message = Message(role="assistant", content=self.text)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message


@dataclass
class Generation:
    """A whole answer."""

    request_id: str
    """The mesh's own id, as in its logs and traces."""
    outputs: list[Output]
    """[n] samples."""
    usage: Usage
    timeline: types_pb2.Timeline | None = None
    """Where the request spent its time; with ``return_timeline``."""
    prompt_token_ids: list[int] | None = None
    """With ``return_prompt_token_ids`` or ``prompt_logprobs``."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, but None for the first; with ``prompt_logprobs``."""

    @property
    def text(self) -> str:
        """Return the text of the first sample."""
        return self.outputs[0].text

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Return the tool calls of the first sample."""
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message:
        """Return the first sample as a message."""
        return self.outputs[0].message


def read_model(model: inference_pb2.Model) -> Model:
    return Model(model.name, model.max_model_len)


class ChunkReader:
    """Turns the responses to one request into chunks."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        params = request.sampling_params
        self._stop = frozenset(request.stop)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._num_also = len(params.logprob_token_ids)
        self._has_logprobs = params.HasField("logprobs")

    def read(self, response: inference_pb2.GenerateResponse) -> Chunk:
        token_ids = list(response.token_ids)
        found = self._has_logprobs and token_ids
        return Chunk(
            index=response.index,
            text=response.text,
            token_ids=token_ids,
            logprobs=_logprobs(response.logprobs, token_ids, self._num_also) if found else None,
            finish_reason=_FINISH_REASONS.get(response.finish_reason),
            stop_reason=self._stop_reason(response.stop_reason),
            usage=_usage(response.usage) if response.HasField("usage") else None,
            reasoning=response.reasoning,
            tool_calls=list(map(read_delta, response.tool_calls)),
            routed_experts=to_array(response.routed_experts) if response.HasField("routed_experts") else None,
        )

    def _stop_reason(self, reason: str) -> int | str | None:
        if reason in self._stop:
            return reason
        return int(reason) if reason.isdecimal() and int(reason) in self._stop_token_ids else None


class AnswerCollector:
    """Joins the responses to one request."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._reader = ChunkReader(request)
        self._outputs = [Output(index, "", []) for index in range(max(request.n, 1))]
        if request.sampling_params.HasField("logprobs"):
            for output in self._outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0
        self._prompt_token_ids: list[int] | None = [] if request.return_prompt_token_ids else None
        has_prompt = request.sampling_params.HasField("prompt_logprobs")
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if has_prompt else None
        self._with_timeline = request.return_timeline
        self._last = inference_pb2.GenerateResponse()

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        chunk = self._reader.read(response)
        output = self._outputs[chunk.index]
        output.text += chunk.text
        output.token_ids += chunk.token_ids
        output.finish_reason = chunk.finish_reason or output.finish_reason
        output.stop_reason = chunk.stop_reason if chunk.finish_reason else output.stop_reason
        output.reasoning += chunk.reasoning
        for delta in chunk.tool_calls:
            add_delta(output.tool_calls, delta)
        if chunk.logprobs:
            self._add_logprobs(output, chunk)
        if chunk.routed_experts is not None:
            output.routed_experts = chunk.routed_experts
        self._add_prompt(response)
        self._last = response

    def result(self) -> Generation:
        """Return the answer, after the last response was added."""
        return Generation(
            request_id=self._last.request_id,
            outputs=self._outputs,
            usage=_usage(self._last.usage),
            timeline=self._last.timeline if self._with_timeline else None,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _add_logprobs(self, output: Output, chunk: Chunk) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        output.logprobs += chunk.logprobs or []
        for token_id, found in zip(chunk.token_ids, chunk.logprobs or [], strict=True):
            output.cumulative_logprob += found[token_id].logprob

    def _add_prompt(self, response: inference_pb2.GenerateResponse) -> None:
        if self._prompt_token_ids is not None:
            self._prompt_token_ids += response.prompt_token_ids
        if self._prompt_logprobs is not None and (count := len(response.prompt_logprobs.sampled)):
            assert self._prompt_token_ids is not None
            start = len(self._prompt_logprobs)
            token_ids = self._prompt_token_ids[start : start + count]
            self._prompt_logprobs += _logprobs(response.prompt_logprobs, token_ids, 0)


def _usage(usage: inference_pb2.Usage) -> Usage:
    reasoning = usage.reasoning_tokens if usage.HasField("reasoning_tokens") else None
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=reasoning,
        cache_write_tokens=usage.cache_write_tokens,
        cpu_ms=usage.cpu_ns / 1e6 if usage.cpu_ns else None,
    )


def _logprobs(columns: types_pb2.Logprobs, token_ids: Sequence[int], num_also: int) -> list[dict[int, Logprob]]:
    """Return a dict for each of ``token_ids``, [n]: first the token itself, then the best in descending order, then the
    ``num_also`` that the request named."""
    positions = []
    for index, token_id in enumerate(token_ids):
        found = {token_id: Logprob(columns.sampled[index], columns.rank[index])}
        for place in range(columns.top):
            at = index * columns.top + place
            rank = place + 1 if place < columns.top - num_also else None
            found.setdefault(columns.token_id[at], Logprob(columns.logprob[at], rank))
        positions.append(found)
    return positions


@dataclass(frozen=True)
class TimedText:
    """A part of what is said in a sound."""

    text: str
    start: float
    """Seconds of the sound, as of ``end``."""
    end: float


@dataclass(frozen=True)
class Transcribed:
    """What is said in a sound."""

    text: str
    seconds: float
    """Of the sound."""
    language: str
    """Code of the language that is spoken; empty: the model knows one only."""
    segments: Sequence[TimedText] = ()
    """With ``return_segments``."""
    words: Sequence[TimedText] = ()
    """With ``return_words``."""


def read_transcribed(responses: Iterable[inference_pb2.TranscribeResponse]) -> Transcribed:
    """Return the result of a call, from all its responses."""
    whole = inference_pb2.TranscribeResponse()
    texts = list[str]()
    for response in responses:
        texts.append(response.text)
        whole.MergeFrom(response)
    segments, words = (
        [TimedText(each.text, each.start, each.end) for each in all_of] for all_of in (whole.segments, whole.words)
    )
    return Transcribed("".join(texts), whole.seconds, whole.language, segments, words)
