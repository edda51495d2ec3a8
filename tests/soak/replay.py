"""``python -m tests.soak.replay``: random conversations over every API; each answer goes back as history to all.

The law: whatever one of the APIs returned, streamed or not, cut or not, is accepted by each API, and the prompt that
the template writes is the one of the same history in a chat completion.
"""

import argparse
import asyncio
import itertools
import json
import logging
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio

from tests.services.gateway.fakes import FakeMesh, FakeTokenizer
from tests.services.tokenizer.families import FAMILIES, form_of, template_of
from tests.soak.dialects import Asked, Chats, Dialect, Messages, Ollama, Refused, Responses, Turn, calls
from tests.soak.family_writer import FamilyWriter
from tests.soak.grpc_dialect import Grpc
from tests.soak.writer import WORD, Writer
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import errors, wire_errors
from tokenloom.request.tool_format import FORMATS, to_json
from tokenloom.services.gateway.formats.call_parser import numbered_call_id
from tokenloom.services.tokenizer.chat_template import ChatTemplate, TemplateRefused
from tokenloom.v1 import tokenizer_pb2, types_pb2

TURNS = 5
"""Answers of one conversation."""
PIECES = (1, 2, 3, 7, 20, 80, 1000)
"""Characters of a delta."""
PARSERS = ("hermes", "llama3_json", "mistral")
"""Formats whose calls are written here in more ways than templates do, also malformed ones."""
FORMS = (*PARSERS, *FAMILIES)
LIMITS = types_pb2.ModelLimits(
    max_model_len=1 << 20, vocab_size=256, reasoning=types_pb2.REASONING_MODE_FREE, max_logprobs=20
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "list_files")
]
_LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
_CALLS = "{% for t in m.tool_calls or [] %}[{{ t.function.name }}"
_ENDS = "]{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = (
    CheckpointInfo.load(DEMO_MODEL).chat_template,
    _LOOP + _CALLS + " {{ t.function.arguments | tojson }}" + _ENDS,
    _LOOP + _CALLS + "{% for k, v in t.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}" + _ENDS,
)
"""They write arguments as a text or as JSON, as JSON, and member by member."""


class ReplayTokenizer(FakeTokenizer):
    """Renders conversations as a tokenizer does. The token ids say nothing.

    Attributes:
        template: Renders.
        prompt: The last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.template = ChatTemplate("")
        self.prompt = ""

    async def EncodeChat(self, request: tokenizer_pb2.EncodeChatRequest, context: Any) -> Any:
        kwargs = json.loads(request.template_kwargs_json or b"{}")
        try:
            self.prompt = self.template.render(
                json.loads(request.messages_json),
                json.loads(request.tools_json or b"null"),
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=kwargs,
            )
        except TemplateRefused as error:
            await wire_errors.abort(context, errors.InvalidArgument(str(error), "messages"))
        return tokenizer_pb2.EncodeChatResponse(prompt=self._prompt(b"prompt", request))


class Model:
    """Answers the requests of a mesh with a text, in pieces."""

    def __init__(self, mesh: FakeMesh) -> None:
        self._mesh = mesh
        self._next: tuple[str, int, int] = "", 1, types_pb2.FINISH_REASON_STOP

    def write(self, text: str, piece: int = 1000, reason: int = types_pb2.FINISH_REASON_STOP) -> None:
        """Make a text the answer to what comes."""
        self._next = text, piece, reason

    async def serve(self) -> None:
        while True:
            request = await self._mesh.outputs.requests.get()
            text, piece, reason = self._next
            for at in range(0, len(text), piece):
                request.send(text[at : at + piece], [0])
            request.finish(reason)


class Replay:
    """One gateway and the clients of its APIs."""

    def __init__(self, parser: str, tokenizer: ReplayTokenizer, model: Model, dialects: Sequence[Dialect]) -> None:
        """``parser``: of the model's calls, or the family of the model."""
        self._parser = parser
        self._form = form_of(parser) if parser in FAMILIES else FORMATS[parser]
        self._tokenizer = tokenizer
        self._model = model
        self._dialects = dialects
        self._chats = dialects[0]

    async def converse(self, seed: int) -> Counter[str]:
        """Have one conversation. Raises ``AssertionError`` with the seed. Returns how many turns of a kind it had."""
        rng = random.Random(seed)
        is_family, seen = self._parser in FAMILIES, Counter[str]()
        writer = FamilyWriter(rng, self._parser) if is_family else Writer(rng, self._parser)
        template = ChatTemplate(rng.choice(TEMPLATES) or "")
        self._tokenizer.template = template_of(self._parser) if is_family else template
        turns: list[Turn] = []
        if rng.random() < 0.5:
            turns.append(Turn("system", (writer.words(),)))
        turns.append(self._user(rng, writer))
        for _ in range(TURNS):
            dialect = rng.choice(self._dialects)
            choice = "auto" if dialect.name == "ollama" else rng.choice(("auto", "auto", "required", "get_weather"))
            tools = TOOLS if choice != "auto" or rng.random() < 0.8 else ()
            asked = Asked(tools, choice, stream=rng.random() < 0.5, share=rng.choice((1.0, 1.0, 1.0, rng.random())))
            text = writer.output(choice)
            reason = types_pb2.FINISH_REASON_STOP
            if rng.random() < 0.4:
                text = text[: rng.randint(0, len(text))]
                reason = rng.choice((types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT))
            self._model.write(text, rng.choice(PIECES), reason)
            where = f"seed {seed}, {self._parser}, {dialect.name}, {choice}, {asked.stream}, {asked.share}: {text!r}"
            try:
                native = await dialect.ask(turns, asked)
                answer = self._answer(dialect, native)
                if asked.share == 1:
                    _check_words(dialect, text, answer, writer.in_arguments)
                turns.append(answer)
                turns += self._results(rng, writer, answer)
                if turns[-1].role == "assistant" or rng.random() < 0.3:
                    turns.append(self._user(rng, writer))
                await self._send_back(dialect, turns, asked)
            except (AssertionError, Refused, grpc.aio.AioRpcError) as error:
                raise AssertionError(f"{where}: {error}") from error
            seen[dialect.name] += 1
            seen["cut"] += reason != types_pb2.FINISH_REASON_STOP
            seen["lost by the client"] += asked.stream and asked.share < 1
            seen["with calls"] += bool(calls(answer.parts))
            seen["with reasoning"] += any(part.kind == "thought" for part in answer.parts)
        return seen

    def _answer(self, dialect: Dialect, native: Any) -> Turn:
        """Return an answer in the form of every API."""
        parts = dialect.read(native)
        if dialect.name == "ollama":  # whose calls have no ids; the other APIs need some
            parts = [
                replace(part, call_id=numbered_call_id(self._form, part.name, at)) for at, part in enumerate(parts)
            ]
        written = {each.name: native if each is dialect else each.write(parts) for each in self._dialects}
        return Turn("assistant", parts=tuple(parts), native=written)

    def _user(self, rng: random.Random, writer: Writer) -> Turn:
        return Turn("user", tuple(writer.words() for _ in range(rng.choice((1, 1, 2)))))

    def _results(self, rng: random.Random, writer: Writer, answer: Turn) -> list[Turn]:
        return [Turn("tool", (writer.words(),) * rng.choice((1, 1, 2)), call) for call in calls(answer.parts)]

    async def _send_back(self, source: Dialect, turns: Sequence[Turn], asked: Asked) -> None:
        """Send a conversation to every API, and compare the prompts with that of the same one as a chat."""
        self._model.write("ok")
        plain = Asked(asked.tools)
        prompts: dict[str, str] = {}
        for dialect in self._dialects:
            same = [self._as_chat(dialect, turn) for turn in turns]
            if dialect.name == "ollama":
                same = [*self._numbered(same)]
            if dialect.name == "responses":
                # A response without output is no item.
                same = [turn for turn in same if turn.role != "assistant" or turn.parts]
            key = repr([(turn.native.get("chat", turn.texts), turn.call) for turn in same])
            if key not in prompts:
                await self._chats.ask(same, plain)
                prompts[key] = self._tokenizer.prompt
            expected = prompts[key]
            last_id = dialect.last_id if isinstance(dialect, Responses) else ""
            await dialect.ask(turns, plain)
            _equal(dialect.name, self._tokenizer.prompt, expected)
            if isinstance(dialect, Responses) and source is dialect and asked.share == 1:
                await dialect.ask(turns, plain, refers=last_id)
                if all(turn.parts for turn in turns if turn.role == "assistant"):
                    _equal("previous_response_id", self._tokenizer.prompt, expected)

    def _as_chat(self, dialect: Dialect, turn: Turn) -> Turn:
        """Return a turn as a chat that holds the same as the API's own form of it."""
        if turn.role != "assistant":
            return turn
        parts = dialect.read(turn.native[dialect.name])
        return replace(turn, parts=tuple(parts), native={"chat": self._chats.write(parts)})

    def _numbered(self, turns: Sequence[Turn]) -> Iterator[Turn]:
        """Yield the turns of an API whose calls have no ids with those that the gateway gives them."""
        count, open_ids = itertools.count(), deque[str]()
        for turn in turns:
            parts = [
                replace(part, call_id=numbered_call_id(self._form, part.name, next(count)))
                if part.kind == "call"
                else part
                for part in turn.parts
            ]
            open_ids += [part.call_id for part in parts if part.kind == "call"]
            call = turn.call and replace(turn.call, call_id=open_ids.popleft())
            native = {"chat": self._chats.write(parts)} if turn.role == "assistant" else turn.native
            yield replace(turn, parts=tuple(parts), call=call, native=native)


def _equal(name: str, prompt: str, expected: str) -> None:
    assert prompt == expected, f"{name}: {prompt!r} is not {expected!r}"


def _check_words(dialect: Dialect, output: str, answer: Turn, in_arguments: Collection[str]) -> None:
    """Check that the answer has each word of the output. Two APIs have no place for arguments that were cut."""
    found = set(WORD.findall(" ".join(part.text for part in answer.parts)))
    wanted = WORD.findall(output)
    if dialect.name in ("messages", "ollama"):
        wanted = [word for word in wanted if word not in in_arguments]
    lost = [word for word in wanted[:-1] if word not in found]  # the last one may have been cut
    assert not lost, f"lost {lost} of {output!r}: {answer.parts}"


@asynccontextmanager
async def replaying(directory: Path, parser: str) -> AsyncIterator[Replay]:
    """A gateway whose model writes what a test says, with calls in one form: of a parser, or of a family, which the
    tokenizer derives from its template."""
    await asyncio.to_thread(directory.mkdir)
    mesh = FakeMesh(directory)
    tokenizer = mesh.tokenizer = mesh.second_tokenizer = ReplayTokenizer()
    mesh.coordinator.limits = LIMITS
    mesh.seconds = None
    stored = 4 << 20  # bytes of responses: the last ones are referred to
    if is_family := parser in FAMILIES:
        tokenizer.tool_format_json = to_json(form_of(parser))
    parsers = {"tool_call_parser": "auto" if is_family else parser, "reasoning_parser": "qwen3"}
    gateway = mesh.gateway(**parsers, max_stored_response_bytes=stored)
    async with gateway, mesh.http() as http, mesh.inference() as inference:
        model = Model(mesh)
        serving = asyncio.create_task(model.serve())
        try:
            dialects = [Chats(http), Messages(http), Responses(http), Ollama(http), Grpc(inference)]
            yield Replay(parser, tokenizer, model, dialects)
        finally:
            serving.cancel()


async def replay(directory: Path, seeds: range) -> Counter[str]:
    """Have the conversation of each seed. Returns how many turns of each kind there were."""
    seen = Counter[str]()
    async with AsyncExitStack() as stack:
        meshes: dict[str, Replay] = {}
        for seed in seeds:
            form = FORMS[seed % len(FORMS)]
            if form not in meshes:
                meshes[form] = await stack.enter_async_context(replaying(directory / form, form))
            seen += await meshes[form].converse(seed)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4000, help=f"conversations of {TURNS} turns")
    parser.add_argument("--first", type=int, default=0, help="the first seed; so the seeds can be run in shards")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        seen = asyncio.run(replay(Path(directory), range(arguments.first, arguments.first + arguments.seeds)))
    seconds = time.monotonic() - started
    print(f"{arguments.seeds * TURNS} turns, {seconds:.0f} s: each is accepted as history by every API, word for word")
    print(", ".join(f"{count} {name}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main()
