"""Makes answers of tokens that others have generated: what ``/v1/chat/completions`` and ``/v1/completions`` would have
answered, as a whole or chunk by chunk.

A chunk takes as long as its own tokens, whatever came before it: the client carries what text depends on, and the
gateway keeps what has parsed the chat. When that is lost, the client sends all tokens once more.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.packed_ids import ids_of, pack
from tokenloom.request.reasoning import Reasoning
from tokenloom.v1 import types_pb2

from ..assistant.message_plans import MessagePlan
from ..encoding.sse import encode_json
from ..generation.generator import Generator
from ..mesh.text_client import TextClient, TextState, context_of
from ..mesh.tokenizer_client import TokenizerClient
from ..openapi.token_schemas import (
    DerenderState,
    GeneratedChoice,
    GenerateLogProb,
)
from ..records.generate_request import Chat
from .answer import AssistantTurn, merge_delta
from .derender_body import Derendering, read_prompt
from .openai_logprobs import CompletionLogprobs, TokenPosition, chat_entry

MAX_LOGPROBS: Final = 1 << 18
"""Log probabilities of an answer, alternatives included."""
_VALUES_PER_TURN: Final = 2048
MAX_SESSIONS: Final = 1024
"""Streams that are kept; the client of one that is not sends its tokens once more."""
MAX_CHARS: Final = 64 << 20
"""Of their texts and tools together."""
_SMALL_ANSWER: Final = 16 << 10
"""Bytes of a last answer that is kept for a client that did not get it, and of its chunk's tokens."""
_TOOLS_WEIGHT: Final = 4
"""Bytes of memory that a byte of the tools' JSON takes at least where a parser keeps them as objects."""


@dataclass(slots=True)
class _Output:
    """An output on its way to text."""

    choice: GeneratedChoice
    token_ids: list[int]
    shown_ids: list[int]
    """Without the token that ended it, which is no text."""
    positions: list[TokenPosition] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        return self.choice.finish_reason is not None


class DerenderSession:
    """Holds what has parsed one output so far.

    Attributes:
        num_tokens: Tokens so far.
        num_chars: Characters of their text, and what its tools count.
        repeated: The answer to the chunk that comes again; None: it is new.
    """

    def __init__(self, name: str, turn: AssistantTurn, text: TextState, num_tool_bytes: int = 0) -> None:
        """``num_tool_bytes``: of the JSON of the tools that ``turn`` keeps."""
        self.name = name
        self.turn = turn
        self.text = text
        self.num_tokens = 0
        self.num_chars = _TOOLS_WEIGHT * num_tool_bytes
        self.repeated: bytes | None = None
        self._last: tuple[int, bytes, bytes] | None = None

    def feed(self, piece: str) -> dict[str, object]:
        """Return what more text adds to the message."""
        self.num_chars += len(piece)  # also where nothing can be shown yet, as within a call
        return self.turn.feed(piece, ends=False)

    def note(self, token_ids: list[int], answer: bytes) -> None:
        """Keep the answer to a chunk, which the session has now."""
        packed = pack(token_ids)
        is_small = max(len(answer), len(packed)) <= _SMALL_ANSWER
        self._last = (self.num_tokens - len(token_ids), packed, answer) if is_small else None
        self.repeated = None

    def fits(self, num_tokens: int, token_ids: Sequence[int]) -> bool:
        """Return whether a chunk after so many tokens is the next one, or the last one again."""
        last, self.repeated = self._last, None
        if (
            last is not None
            and last[0] == num_tokens
            and last[1] == pack(token_ids)
            and (token_ids or num_tokens != self.num_tokens)
        ):
            self.repeated = last[2]
            return True
        return num_tokens == self.num_tokens


class DerenderSessions:
    """Keeps sessions by tenant and name. Beyond the limits, the oldest ones go of the tenant that has most of them."""

    def __init__(self) -> None:
        self._kept: dict[
            str, dict[str, DerenderSession]
        ] = {}  # by tenant; the oldest one first; bounded by the constants
        self._num_chars: Counter[str] = Counter()
        self._num = 0

    def take(self, tenant: str, name: str, num_tokens: int, token_ids: Sequence[int]) -> DerenderSession | None:
        """Return a session for a chunk after so many tokens; None if it is not kept, or not at this place. It is the
        caller's until it is put back: a call that is cancelled within a chunk leaves nothing that has half of it."""
        session = self._kept.get(tenant, {}).get(name)
        if session is None or not session.fits(num_tokens, token_ids):
            return None
        if session.repeated is None:
            self._remove(tenant, session)
        return session

    def put(self, tenant: str, session: DerenderSession, token_ids: list[int], answer: bytes) -> None:
        """Keep a session after a chunk. ``token_ids``, ``answer``: of the chunk."""
        session.note(token_ids, answer)
        self._kept.setdefault(tenant, {})[session.name] = session
        self._num_chars[tenant] += session.num_chars
        self._num += 1
        while self._num > MAX_SESSIONS or self._num_chars.total() > MAX_CHARS:
            by_number = self._num > MAX_SESSIONS
            greedy = max(self._kept, key=lambda each: len(self._kept[each]) if by_number else self._num_chars[each])
            self._remove(greedy, next(iter(self._kept[greedy].values())))

    def _remove(self, tenant: str, session: DerenderSession) -> None:
        of_tenant = self._kept[tenant]
        del of_tenant[session.name]
        self._num -= 1
        self._num_chars[tenant] -= session.num_chars
        if not of_tenant:
            del self._kept[tenant], self._num_chars[tenant]


class Derenderer:
    """Answers the calls of one model."""

    def __init__(self, generator: Generator, tokenizers: TokenizerClient, texts: TextClient, model: str) -> None:
        self._generator = generator
        self._tokenizers = tokenizers
        self._texts = texts
        self._model = model
        self._sessions = DerenderSessions()

    async def whole(self, asked: Derendering) -> bytes:
        """Return the JSON of the whole answer. Raises ``InvalidArgument``."""
        outputs = await self._outputs(asked)
        choices: list[dict[str, object]] = []
        for prompt, each_of in zip(asked.prompts, outputs, strict=True):
            opens = await self._reasoning(asked, prompt)
            for output in each_of:
                number = output.choice.index if asked.is_chat else len(choices)
                choices.append(await self._choice(asked, output, context_of(prompt), opens, number))
        first = asked.responses[0]
        answer: dict[str, object] = self._head(asked, first.request_id, is_chunk=False) | {"choices": choices}
        if asked.is_chat:
            answer["prompt_logprobs"] = first.prompt_logprobs
            if asked.options.return_token_ids:
                answer["prompt_token_ids"] = asked.prompts[0]
        num_output = sum(len(output.token_ids) for each_of in outputs for output in each_of)
        return encode_json(answer | {"usage": _usage(self._num_prompt(asked), num_output)})

    async def chunk(self, asked: Derendering) -> bytes:
        """Return the JSON of a chunk, with the state for the next one. Raises ``InvalidArgument``, and ``RequestLost``
        where the tokens before it are needed."""
        ((*outputs,),) = await self._outputs(asked)
        chunk = self._head(asked, asked.responses[0].request_id, is_chunk=True)
        state = asked.state or DerenderState()
        if not outputs:
            body = chunk | {"choices": [], "usage": self._chunk_usage(asked)}
            return encode_json({"chunk": body, "stream_state": state})
        (output,) = outputs
        session = None if asked.options.plan is None else await self._session(asked, state, output.token_ids)
        if session is not None and session.repeated is not None:
            return session.repeated
        text = TextState(list(state.prev_token_ids), state.held_text, state.stop_string)
        if session is not None:
            text = session.text
        elif asked.state is None:
            text = context_of(asked.prompts[0])
        was_stopped = text.stop_string is not None
        delta, logprobs, state = await self._delta(asked, output, state, text, session)
        reason, stop = (None, None) if was_stopped else _ending(output.choice, text)
        if session is not None and reason is not None:
            reason = session.turn.finish_reason(reason, is_stopped=isinstance(stop, str))
        choice: dict[str, object] = {"index": output.choice.index, **delta, "logprobs": logprobs}
        choice |= {"finish_reason": reason, "stop_reason": stop}
        choice |= _origin(output.choice)
        if asked.options.return_token_ids:
            choice["token_ids"] = output.token_ids
        body = chunk | {"choices": [choice], "usage": self._chunk_usage(asked)}
        answer = encode_json({"chunk": body, "stream_state": state})
        if session is not None and not output.ends:
            self._sessions.put(asked.request.tenant.name, session, output.token_ids, answer)
        return answer

    async def _delta(
        self,
        asked: Derendering,
        output: _Output,
        state: DerenderState,
        text: TextState,
        session: DerenderSession | None,
    ) -> tuple[dict[str, object], msgspec.Raw | None, DerenderState]:
        """Return the new part of an output, its log probabilities, and the state after it."""
        parts: dict[str, object] = {}
        shown: list[str] = []
        was_stopped = text.stop_string is not None
        async for piece in self._pieces(asked, output, text, ends=output.ends, num_before=state.num_tokens):
            shown.append(piece)
            if session is not None:
                merge_delta(parts, session.feed(piece))
        is_over = output.ends or text.stop_string is not None
        if session is not None and is_over and not was_stopped:
            merge_delta(parts, session.turn.feed("", ends=True))
        logprobs, offset = await _logprobs(asked, output, state.text_offset)
        new_text = "".join(shown)
        after = DerenderState(
            prev_token_ids=text.context_ids,
            held_text=text.held_text,
            stop_string=text.stop_string,
            role_sent=True,
            num_tokens=state.num_tokens + len(output.token_ids),
            text_offset=offset,
            session="" if session is None else session.name,
        )
        if session is not None:
            session.num_tokens = after.num_tokens
        if not asked.is_chat:
            return {"text": new_text}, logprobs, after
        delta = parts if session is not None else {"content": new_text} if new_text else {}
        if not state.role_sent:
            delta = {"role": "assistant", **delta}
        return {"delta": delta}, logprobs, after

    async def _session(self, asked: Derendering, state: DerenderState, chunk_ids: list[int]) -> DerenderSession:
        """Return what has parsed the output so far, made anew if the client sends it. Raises ``RequestLost``."""
        tenant, plan = asked.request.tenant.name, asked.options.plan
        if state.session and (kept := self._sessions.take(tenant, state.session, state.num_tokens, chunk_ids)):
            return kept
        prompt = asked.prompts[0]
        before = read_prompt("stream_state.output_token_ids", state.output_token_ids) or []
        if len(before) != state.num_tokens:
            if before:
                reason = f"it has {len(before)} ids, but {state.num_tokens} tokens came before this chunk"
                raise errors.InvalidArgument(f"output_token_ids: {reason}", "stream_state.output_token_ids")
            raise errors.RequestLost(
                "This gateway does not have what has parsed the answer so far; send the chunk again with all "
                "tokens before it in stream_state.output_token_ids."
            )
        await self._check_length(len(before), "stream_state.output_token_ids")
        opens, may_reason = await self._reasoning(asked, prompt)
        chat, turn = asked.request.prompts, AssistantTurn(plan, opens, may_reason)
        keeps_tools = plan is not None and plan.open_tools is not None
        num_bytes = len(chat.tools_json) if keeps_tools and isinstance(chat, Chat) else 0
        session = DerenderSession(self._generator.draw_id(), turn, context_of(prompt), num_bytes)
        options, least = asked.request.text, asked.request.sampling.min_tokens
        async for piece in self._texts.texts(session.text, before, options, tenant, ends=False, min_tokens=least):
            session.feed(piece)
        session.num_tokens = len(before)
        return session

    async def _choice(
        self,
        asked: Derendering,
        output: _Output,
        text: TextState,
        opens: tuple[bool, bool],
        number: int,
    ) -> dict[str, object]:
        """Return a whole output as a choice of this number."""
        turn = AssistantTurn(asked.options.plan, *opens)
        pieces: list[str] = []
        async for piece in self._pieces(asked, output, text, ends=True):
            if asked.is_chat:
                turn.feed(piece, ends=False)
            else:
                pieces.append(piece)
        if asked.is_chat:
            turn.feed("", ends=True)
        reason, stop = _ending(output.choice, text)
        reason, choice = reason or "stop", dict[str, object](index=number)
        if asked.is_chat:
            choice["message"] = turn.message()
            reason = turn.finish_reason(reason, is_stopped=isinstance(stop, str))
        else:
            choice["text"] = "".join(pieces)
        logprobs, _ = await _logprobs(asked, output, 0)
        choice |= {"logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}
        choice |= _origin(output.choice)
        if asked.options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    async def _pieces(
        self, asked: Derendering, output: _Output, text: TextState, *, ends: bool, num_before: int = 0
    ) -> AsyncIterator[str]:
        tenant, least = asked.request.tenant.name, asked.request.sampling.min_tokens - num_before
        async for piece in self._texts.texts(
            text, output.shown_ids, asked.request.text, tenant, ends=ends, min_tokens=max(least, 0)
        ):
            yield piece

    async def _reasoning(self, asked: Derendering, prompt: Sequence[int] | None) -> tuple[bool, bool]:
        """Return whether the outputs begin within reasoning, and whether they may reason: as for a generation."""
        plan: MessagePlan | None = asked.options.plan
        if plan is None or plan.open_reasoning is None:
            return False, False
        chat, start = asked.request.prompts, types_pb2.REASONING_START_UNSPECIFIED
        if isinstance(chat, Chat) and asked.knows_chat and not chat.media:  # the template says it best
            rendered = (await self._tokenizers.encode_chat(chat, tenant=asked.request.tenant.name)).prompt
            start, prompt = rendered.reasoning_start, prompt or ids_of(rendered)
        limits = await self._generator.wait_limits()
        is_constrained = asked.request.sampling.HasField("structured_outputs")
        may_reason = not (is_constrained and limits.reasoning != types_pb2.REASONING_MODE_FREE)
        opens = start == types_pb2.REASONING_START_OPEN
        if (marks := self._generator.reasoning_marks) is not None:
            found = Reasoning(marks, prompt or (), start)
            opens, may_reason = opens or found.is_inside, may_reason and not found.is_over
        return opens, may_reason

    async def _outputs(self, asked: Derendering) -> list[list[_Output]]:
        """Return the outputs of each answer, checked, with the texts of their log probabilities."""
        info = self._tokenizers.info
        ends = set(asked.options.stop_token_ids) | set(
            () if info is None or asked.request.ignore_eos else info.eos_token_ids
        )
        outputs: list[list[_Output]] = []
        for response in asked.responses:
            outputs.append([])
            for choice in response.choices:
                where = "choices[].token_ids"
                ids = [] if choice.token_ids is None else narrow_token_ids(where, choice.token_ids)
                await self._check_length(len(ids), where)
                hides_last = choice.finish_reason is not None or not asked.streams
                hides_last = hides_last and bool(ids) and ids[-1] in ends and not asked.options.shows_stop
                outputs[-1].append(_Output(choice, ids, ids[:-1] if hides_last else ids))
        await self._resolve([output for each in outputs for output in each], asked.request.tenant.name)
        return outputs

    async def _resolve(self, outputs: Sequence[_Output], tenant: str) -> None:
        """Give the log probabilities of outputs the texts of their tokens."""
        wanted: set[int] = set()
        num = 0
        for output in outputs:
            for entry in _entries(output.choice):
                wanted.add(entry.token_id)
                wanted.update(each.token_id for each in entry.top_logprobs)
                num += 1 + len(entry.top_logprobs)
        if num > MAX_LOGPROBS:
            raise errors.InvalidArgument(f"at most {MAX_LOGPROBS} log probabilities are taken in a call", "logprobs")
        if not wanted:
            return
        data, slices = await self._texts.bytes_of(list(wanted), tenant), _Slices()
        for output in outputs:
            for entry in _entries(output.choice):
                top: Sequence[GenerateLogProb] = entry.top_logprobs
                await slices.count(1 + len(top))
                output.positions.append(
                    TokenPosition(
                        entry.token_id,
                        data[entry.token_id],
                        entry.logprob,
                        entry.rank,
                        [each.token_id for each in top],
                        [data[each.token_id] for each in top],
                        [each.logprob for each in top],
                        [each.rank for each in top],
                    )
                )

    async def _check_length(self, num_tokens: int, where: str) -> None:
        limits = await self._generator.wait_limits()
        if num_tokens > limits.max_model_len:
            reason = f"{num_tokens} tokens are more than the model's context of {limits.max_model_len}"
            raise errors.InvalidArgument(f"{where}: {reason}", where)

    def _head(self, asked: Derendering, request_id: str, *, is_chunk: bool) -> dict[str, object]:
        names = (
            ("chat.completion", "chat.completion.chunk") if asked.is_chat else ("text_completion", "text_completion")
        )
        model = self._model if asked.request.adapter is None else asked.request.adapter.name
        return {"id": request_id, "object": names[is_chunk], "created": int(time.time()), "model": model}

    def _num_prompt(self, asked: Derendering) -> int:
        if asked.num_prompt_tokens is not None:
            return asked.num_prompt_tokens
        return sum(len(prompt or ()) for prompt in asked.prompts)

    def _chunk_usage(self, asked: Derendering) -> dict[str, object] | None:
        usage = asked.responses[0].usage
        if usage is None:
            return None
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        prompt, output = (count if isinstance(count, int) else 0 for count in counts)
        return _usage(prompt if asked.num_prompt_tokens is None else asked.num_prompt_tokens, output)


def _entries(choice: GeneratedChoice) -> Sequence[Any]:
    return () if choice.logprobs is None else choice.logprobs.content or ()


def _ending(choice: GeneratedChoice, text: TextState) -> tuple[str | None, str | int | None]:
    """Return why an output ends, and what stopped it. A stop string ends it where its text does: what the engine
    generated beyond it is not shown."""
    if text.stop_string is not None:
        return "stop", text.stop_string
    return choice.finish_reason, choice.stop_reason


def _origin(choice: GeneratedChoice) -> dict[str, object]:
    """Return what an answer in tokens says of where they come from, as the answer in text has it."""
    named = {"weights_version": choice.weights_version, "mixed_numerics": choice.mixed_numerics}
    return {name: value for name, value in named.items() if value}


async def _logprobs(asked: Derendering, output: _Output, offset: int) -> tuple[msgspec.Raw | None, int]:
    """Return the JSON of an output's log probabilities, if it has any, and the characters up to the end of it."""
    if output.choice.logprobs is None:
        return None, offset
    as_ids, slices = asked.options.tokens_as_ids, _Slices()
    if asked.is_chat:
        entries: list[bytes] = []
        for at in output.positions[: len(output.shown_ids)]:
            await slices.count(1 + len(at.ids))
            entries.append(chat_entry(at, as_ids=as_ids))
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(entries)), offset
    columns = CompletionLogprobs(as_ids=as_ids, offset=offset)
    for at in output.positions:
        await slices.count(1 + len(at.ids))
        columns.add(at)
    return msgspec.Raw(b"".join(columns.take())), columns.offset


class _Slices:
    """Lets the event loop run after each few thousand values."""

    def __init__(self) -> None:
        self._num = 0

    async def count(self, num_values: int) -> None:
        self._num += num_values
        if self._num >= _VALUES_PER_TURN:
            self._num = 0
            await asyncio.sleep(0)


def _usage(prompt: int, output: int) -> dict[str, object]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
