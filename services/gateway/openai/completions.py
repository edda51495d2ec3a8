"""``/v1/completions``: reads bodies and shapes answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.request.prompt_embeds import FIELD

from ..encoding import sse
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openapi.request_schemas import CompletionRequest
from ..records.generate_request import EmbeddedPrompt, GenerateRequest, read_embeds_prompts
from ..tenants.tenant import Tenant
from .answer import MANY_PARTS, VALUES_PER_STEP, AnswerBase, choice_blocks, finish_reason, origin_members
from .body_reader import (
    AnswerOptions,
    Body,
    BodyReader,
    ignored_in_stream_options,
    make_generate_request,
    sampling_params,
)
from .event_ids import FINISHED, IdKind
from .openai_logprobs import CompletionLogprobs, TokenPosition


@dataclass(frozen=True, slots=True)
class CompletionsApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    event_ids = IdKind.POSITION

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, CompletionRequest)
        echo = bool(fields.echo)
        echo_only = echo and body.get("max_tokens") == 0 and type(body["max_tokens"]) is int
        own: dict[str, object] = {"max_tokens": 1} if echo_only else {}
        if fields.vllm_xargs is not None:
            own["extra_args"] = fields.vllm_xargs
        sampling, lost = sampling_params(body, logprobs=fields.logprobs, **own)
        ignored = (*self.reader.ignored(body, CompletionRequest), *ignored_in_stream_options(body), *lost)
        names = {"structured_outputs": "response_format"} if body.get("structured_outputs") is None else {}
        names |= {} if fields.vllm_xargs is None else {"extra_args": "vllm_xargs"}
        options = AnswerOptions.of(fields, sampling, echo=echo, echo_only=echo_only, ignored=ignored, field_names=names)
        if echo and sampling.HasField("logprobs") and not sampling.HasField("prompt_logprobs"):
            sampling.prompt_logprobs = sampling.logprobs
        request = make_generate_request(
            fields,
            # A body with both is refused and not taken for two prompts: parts of one prompt, ids and embeddings, come
            # in one list.
            _prompts(fields.prompt) if fields.prompt_embeds is None else _embeds_prompts(fields),
            "prompt" if fields.prompt_embeds is None else FIELD,
            sampling,
            tenant,
            echo=echo,
            add_special_tokens=fields.add_special_tokens is not False,
        )
        if fields.best_of is not None and fields.best_of != request.num_samples:
            raise errors.InvalidArgument("best_of other than n is not supported", "best_of")
        return request, options

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> "CompletionAnswer":
        return CompletionAnswer(AnswerBase(generation, options, "cmpl", generation.model, "text_completion"))


class CompletionAnswer:
    """Shapes the continuations of one prompt or several; a stream interleaves them."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer
        outputs = range(base.generation.num_outputs)
        self._texts: list[list[str]] = [[] for _ in outputs]
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
        if (ids := self._base.ids) is not None:
            ids.advance(delta)
        if delta.finished is None and not self._has_details:
            if not delta.text:
                return b""
            head, tail = self._text_ends[delta.index]
            event = b"%b%b%b" % (head, sse.encode_json(delta.text), tail)
            return event if ids is None else ids.line(delta.index) + event
        if self._base.options.echo_only:
            _drop_output(delta)
        if not (delta.text or delta.finished is not None or (self._has_details and delta.token_ids)):
            return b""
        if self._base.options.num_logprobs is not None and not self._logprobs[delta.index]:
            for _ in self._columns(delta):
                pass
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        text = self._echoed(delta.index) + delta.text if is_first else delta.text
        extra, finish, timeline = self._ids(delta, is_first=is_first), b"null", b""
        if delta.finished is not None:
            self._live -= 1
            finish = sse.encode_json(finish_reason(delta.finished))
            extra += b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            extra += sse.members(origin_members(delta.finished))
            if self._live == 0 and not self._base.options.include_usage:
                timeline = sse.members(self._base.last_members())
        logprobs = b"null"
        if self._base.options.num_logprobs is not None:
            logprobs = b"".join(self._logprobs[delta.index].take())
        choice = sse.choice(delta.index, b'"text":' + sse.encode_json(text), finish, extra, logprobs)
        line = b"" if ids is None else ids.line(delta.index, "" if delta.finished is None else FINISHED)
        return line + self._writer.event(choice, timeline, self._base.usage_of(delta.index))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""
        self.events(delta)
        self._base.repeated(delta.index)

    def last_events(self) -> bytes:
        """Return the events after all output."""
        return self._base.last_events() + sse.DONE

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""
        return len(delta.logprobs) > MANY_PARTS or (self._base.options.echo and delta.index not in self._begun)

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""
        if self._base.options.echo_only:
            _drop_output(delta)
        return self._columns(delta)

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""
        if self._base.options.echo_only:
            _drop_output(delta)
        if not (delta.token_ids or delta.text or delta.finished is not None):
            return None
        texts = self._texts[delta.index]
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            texts.append(self._echoed(delta.index))
        texts.append(delta.text)
        self._token_ids[delta.index] += delta.token_ids
        return None if self._base.options.num_logprobs is None else self._columns(delta)

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""
        indices = range(len(self._texts))
        if self._base.is_plain:
            return iter((self._base.plain_body("text_completion", list(map(self._choice, indices)), {}),))
        return self._base.body("text_completion", map(self._blocks, indices), ())

    def _columns(self, delta: Delta) -> Iterator[int]:
        """Add log probabilities to the columns, step by step; first those of a prompt that is echoed."""
        columns, num_values = self._logprobs[delta.index], 0
        for at in self._positions(delta, columns):
            columns.add(at)
            num_values += 1 + len(at.ids)
            if num_values >= VALUES_PER_STEP:
                yield num_values
                num_values = 0
        yield num_values

    def _positions(self, delta: Delta, columns: CompletionLogprobs) -> Iterator[TokenPosition]:
        options, generation = self._base.options, self._base.generation
        if options.echo and options.num_logprobs is not None and not columns.has_begun:
            parts = generation.prompt_logprobs[delta.index // generation.num_samples]
            columns.add_first(generation.prompt_of(delta.index)[0], parts[0].first_text if parts else b"")
            yield from self._base.prompt_positions(delta.index)
        if delta.logprobs:
            yield from self._base.positions(delta)

    def _echoed(self, index: int) -> str:
        """Return the prompt before an output's text; empty if it is not echoed."""
        generation = self._base.generation
        return generation.prompt_texts[index // generation.num_samples] if self._base.options.echo else ""

    def _ids(self, delta: Delta, *, is_first: bool) -> bytes:
        """Return the token ids when asked for, with the prompt's in an output's first event."""
        if not self._base.options.return_token_ids:
            return b""
        ids = sse.token_ids_member(delta.token_ids)
        if is_first:
            ids += b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompt_of(delta.index)))
        return ids

    def _choice(self, index: int) -> dict[str, object]:
        """Return a choice; its log probabilities are only marked."""
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": self._base.options.num_logprobs,
            "finish_reason": finish_reason(finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
            choice["prompt_token_ids"] = list(self._base.generation.prompt_of(index))
        return choice | origin_members(finished)

    def _blocks(self, index: int) -> Iterator[bytes]:
        yield from choice_blocks(self._choice(index), self._logprobs[index].take())
        yield from self._base.prompt_logprobs(index)
        yield b"}"


def _drop_output(delta: Delta) -> None:
    """Remove the one token that an engine computes at least."""
    delta.text, delta.token_ids, delta.logprobs = "", [], ()


def _embeds_prompts(fields: CompletionRequest) -> Sequence[EmbeddedPrompt]:
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
        kinds = set(map(type, prompt))  # values decoded from JSON have no subtypes
        if kinds in ({str}, {list}):
            return prompt
        if not kinds & {str, list, dict, type(None)}:
            return [prompt]
    raise errors.InvalidArgument(
        "prompt must be a string, a list of strings, token ids or a list of token ids", "prompt"
    )
