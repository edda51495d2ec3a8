"""``/v1/completions``: reading bodies, shaping answers."""

from collections.abc import Sequence
from typing import Any

from ..runtime import errors
from . import sse
from .answer import AnswerBase, finish_reason
from .chat import members
from .collector import Delta
from .embeds_prompt import EmbedsPrompt, read_prompts
from .generation import Generation
from .job import Job
from .openai_models import Body, BodyReader, CommonFields, Options, sampling_params, text_options


class CompletionFields(CommonFields, frozen=True, kw_only=True):
    """A completion body, but for the sampling parameters."""

    prompt: Any = None
    prompt_embeds: Any = None


class CompletionsApi:
    """The endpoint, for one served model."""

    def __init__(self, reader: BodyReader, model: str) -> None:
        self._reader = reader
        self._model = model

    def read(self, body: Body) -> tuple[Job, Options]:
        fields = self._reader.read(body, CompletionFields)
        sampling = sampling_params(body)
        text = text_options(fields)
        job = Job(
            _prompts(fields.prompt) if fields.prompt_embeds is None else _embeds_prompts(fields),
            "prompt" if fields.prompt_embeds is None else "prompt_embeds",
            sampling,
            text,
            ignore_eos=bool(fields.ignore_eos),
            priority=fields.priority or 0,
        )
        return job, Options.of(fields, sampling)

    def answer(self, generation: Generation, options: Options) -> "CompletionAnswer":
        return CompletionAnswer(AnswerBase(generation, options, "cmpl", self._model))


class CompletionAnswer:
    """The continuations of one prompt or several; a stream interleaves them by index."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer("text_completion")
        num_prompts = len(base.generation.prompts)
        self._texts = [""] * num_prompts
        self._token_ids: list[list[int]] = [[] for _ in range(num_prompts)]
        self._live = num_prompts
        self._begun: set[int] = set()
        self._tells_all = base.options.return_token_ids or base.options.continuous_usage
        self._text_events = [self._writer.text_event(index, b'"text":') for index in range(num_prompts)]

    def first_events(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        if delta.finished is None and not self._tells_all:
            return self._text_events[delta.index](delta.text) if delta.text else b""
        if not (delta.text or delta.finished is not None or (self._tells_all and delta.token_ids)):
            return b""
        extra, finish, timeline = self._ids(delta), b"null", b""
        if delta.finished is not None:
            self._live -= 1
            finish = sse.encode_json(finish_reason(delta.finished))
            extra += b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            if self._live == 0 and not self._base.options.include_usage:
                timeline = members(self._base.timeline())
        choice = sse.choice(delta.index, b'"text":' + sse.encode_json(delta.text), finish, extra)
        return self._writer.event(choice, timeline, self._base.usage_of(delta.index))

    def last_events(self) -> bytes:
        if not self._base.options.include_usage:
            return b""
        return self._writer.event(b"", members(self._base.timeline()), self._base.generation.usage)

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._token_ids[delta.index] += delta.token_ids

    def body(self) -> bytes:
        choices = [self._choice(index) for index in range(len(self._texts))]
        return sse.encode_json(self._base.head("text_completion") | {"choices": choices} | self._base.tail())

    def _ids(self, delta: Delta) -> bytes:
        """Token ids when asked for; the prompt's in the index's first event."""
        if not self._base.options.return_token_ids:
            return b""
        ids = sse.token_ids_member(delta.token_ids)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            ids += b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[delta.index]))
        return ids

    def _choice(self, index: int) -> dict[str, object]:
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "text": self._texts[index],
            "logprobs": None,
            "finish_reason": finish_reason(finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
            choice["prompt_token_ids"] = list(self._base.generation.prompts[index])
        return choice


def _embeds_prompts(fields: CompletionFields) -> Sequence[EmbedsPrompt]:
    if fields.prompt:
        raise errors.InvalidArgument(
            "prompt and prompt_embeds exclude each other; prompt_embeds takes token ids too", "prompt"
        )
    return read_prompts(fields.prompt_embeds)


def _prompts(prompt: object) -> Sequence[str | Sequence[object]]:
    """One prompt or several, as texts or token ids; the ids themselves are checked later, against the limits."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
            return prompt
        if not any(isinstance(item, (str, list, dict)) or item is None for item in prompt):
            return [prompt]
    raise errors.InvalidArgument(
        "prompt must be a string, a list of strings, token ids or a list of token ids", "prompt"
    )
