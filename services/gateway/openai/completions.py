"""``/v1/completions``: reads bodies and shapes answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.request.prompt_embeds import FIELD

from ..generation.generation import Generation
from ..generation.job import EmbedsPrompt, Job, read_embeds_prompts
from ..http import sse
from ..mesh.collector import Delta
from ..openapi.request_schemas import CompletionRequest
from .answer import AnswerBase, finish_reason
from .openai_logprobs import CompletionLogprobs
from .openai_models import Body, BodyReader, Options, make_job, sampling_params


@dataclass(frozen=True, slots=True)
class CompletionsApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    model: str

    def read(self, body: Body) -> tuple[Job, Options]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, CompletionRequest)
        echo = bool(fields.echo)
        echo_only = echo and body.get("max_tokens") == 0 and type(body["max_tokens"]) is int
        own = {"max_tokens": 1} if echo_only else {}
        sampling = sampling_params(body, logprobs=fields.logprobs, **own)
        options = Options.of(fields, sampling, echo=echo, echo_only=echo_only)
        if echo and sampling.HasField("logprobs") and not sampling.HasField("prompt_logprobs"):
            sampling.prompt_logprobs = sampling.logprobs
        job = make_job(
            fields,
            _prompts(fields.prompt) if fields.prompt_embeds is None else _embeds_prompts(fields),
            "prompt" if fields.prompt_embeds is None else FIELD,
            sampling,
            echo=echo,
            add_special_tokens=fields.add_special_tokens is not False,
        )
        if fields.best_of is not None and fields.best_of != job.num_samples:
            raise errors.InvalidArgument("best_of other than n is not supported", "best_of")
        return job, options

    def answer(self, generation: Generation, options: Options) -> "CompletionAnswer":
        return CompletionAnswer(AnswerBase(generation, options, "cmpl", self.model, "text_completion"))


class CompletionAnswer:
    """Shapes the continuations of one prompt or several; a stream interleaves them."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer
        outputs = range(base.generation.num_outputs)
        self._texts = [""] * len(outputs)
        self._token_ids: list[list[int]] = [[] for _ in outputs]
        self._logprobs = [CompletionLogprobs(as_ids=base.options.tokens_as_ids) for _ in outputs]
        self._live = len(outputs)
        self._begun: set[int] = set()
        self._has_details = base.has_details or base.options.echo
        self._text_ends = [self._writer.text_ends(index, b'"text":') for index in outputs]

    def first_events(self) -> bytes:
        """Return the events before any output."""
        return b""

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        if delta.finished is None and not self._has_details:
            head, tail = self._text_ends[delta.index]
            return b"%b%b%b" % (head, sse.encode_json(delta.text), tail) if delta.text else b""
        if self._base.options.echo_only:
            _drop_output(delta)
        if not (delta.text or delta.finished is not None or (self._has_details and delta.token_ids)):
            return b""
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        text = self._take(delta, is_first=is_first)
        extra, finish, timeline = self._ids(delta, is_first=is_first), b"null", b""
        if delta.finished is not None:
            self._live -= 1
            finish = sse.encode_json(finish_reason(delta.finished))
            extra += b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            if self._live == 0 and not self._base.options.include_usage:
                timeline = sse.members(self._base.timeline())
        logprobs = b"null"
        if self._base.options.num_logprobs is not None:
            logprobs = sse.encode_json(self._logprobs[delta.index].take())
        choice = sse.choice(delta.index, b'"text":' + sse.encode_json(text), finish, extra, logprobs)
        return self._writer.event(choice, timeline, self._base.usage_of(delta.index))

    def last_events(self) -> bytes:
        """Return the events after all output, without ``[DONE]``."""
        return self._base.last_events()

    def add(self, delta: Delta) -> None:
        """Keep some output for :meth:`body`."""
        if self._base.options.echo_only:
            _drop_output(delta)
        if not (delta.token_ids or delta.text or delta.finished is not None):
            return
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        self._texts[delta.index] += self._take(delta, is_first=is_first)
        self._token_ids[delta.index] += delta.token_ids

    def body(self) -> bytes:
        """Return the whole JSON response."""
        choices = [self._choice(index) for index in range(len(self._texts))]
        return sse.encode_json(self._base.head("text_completion") | {"choices": choices} | self._base.tail())

    def _take(self, delta: Delta, *, is_first: bool) -> str:
        """Return a delta's text and keep its log probabilities; the first delta comes after the prompt's, if echoed."""
        options, generation, columns = self._base.options, self._base.generation, self._logprobs[delta.index]
        echoed = ""
        if is_first and options.echo:
            echoed = generation.prompt_texts[delta.index // generation.num_samples]
            if options.num_logprobs is not None:
                parts = generation.prompt_logprobs[delta.index // generation.num_samples]
                columns.add_first(generation.prompt_of(delta.index)[0], parts[0].first_text if parts else b"")
                columns.add(self._base.prompt_positions(delta.index))
        columns.add(self._base.positions(delta))
        return echoed + delta.text

    def _ids(self, delta: Delta, *, is_first: bool) -> bytes:
        """Return the token ids when asked for, with the prompt's in an output's first event."""
        if not self._base.options.return_token_ids:
            return b""
        ids = sse.token_ids_member(delta.token_ids)
        if is_first:
            ids += b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompt_of(delta.index)))
        return ids

    def _choice(self, index: int) -> dict[str, object]:
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "text": self._texts[index],
            "logprobs": None if self._base.options.num_logprobs is None else self._logprobs[index].take(),
            "finish_reason": finish_reason(finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
            choice["prompt_token_ids"] = list(self._base.generation.prompt_of(index))
        return choice | self._base.prompt_logprobs(index)


def _drop_output(delta: Delta) -> None:
    """Remove the one token that an engine computes at least."""
    delta.text, delta.token_ids, delta.logprobs = "", [], ()


def _embeds_prompts(fields: CompletionRequest) -> Sequence[EmbedsPrompt]:
    if fields.prompt:
        raise errors.InvalidArgument(f"prompt and {FIELD} exclude each other; {FIELD} accepts token ids too", "prompt")
    if fields.echo:
        raise errors.InvalidArgument(f"echo is not supported with {FIELD}: embeddings have no text", "echo")
    return read_embeds_prompts(fields.prompt_embeds)


def _prompts(prompt: object) -> Sequence[str | Sequence[object]]:
    """Return one prompt or several, as texts or token ids; the ids are checked later, against the limits."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        kinds = {type(item) for item in prompt}  # values decoded from JSON have no subtypes
        if kinds in ({str}, {list}):
            return prompt
        if not kinds & {str, list, dict, type(None)}:
            return [prompt]
    raise errors.InvalidArgument(
        "prompt must be a string, a list of strings, token ids or a list of token ids", "prompt"
    )
