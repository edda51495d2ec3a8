"""Makes sessions of coding agents from a seed: conversations that grow by tool calls, with branches and sub-agents.

The shapes are those of public traces (docs/understand/benchmarks.md, "Agents"); all texts are made here.
"""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tokenizers import Tokenizer

_SAMPLE_TOKENS = 4096
_CALL_TOKENS = 20
"""Tokens of a call beside its arguments, about: marks, name, keys."""


class AgentClient(StrEnum):
    """Names the clients whose requests are sent."""

    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    OPENCODE = "opencode"


class Role(StrEnum):
    """Says whose a message is."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds a call that an assistant makes; ``arguments`` are JSON."""

    call_id: str
    tool: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """Holds a message of a conversation.

    Attributes:
        calls: What an assistant calls.
        answers: The id of the call that a tool's result answers; empty for other messages.
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""

    @property
    def length(self) -> int:
        """Return the characters of the text and of the calls' arguments."""
        return len(self.text) + sum(len(call.arguments) for call in self.calls)


@dataclass(eq=False, slots=True)
class Turn:
    """Describes one request of a session.

    Attributes:
        messages: The conversation that it sends.
        gap: Seconds between the answer before it and this request: a tool runs, or a user reads and writes.
        answer_tokens: Tokens of the model's answer.
        past: An earlier request of the session whose prompt begins like this one's; None: there is none.
        shared: How many of the messages of ``past`` this one begins with.
        is_branch: Whether the user went back to an earlier request.
        sub_agents: Lines that end before this request is sent; their reports are in its last message.
    """

    messages: tuple[Message, ...]
    gap: float
    answer_tokens: int
    past: "Turn | None" = None
    shared: int = 0
    is_branch: bool = False
    sub_agents: "tuple[Line, ...]" = ()


@dataclass(frozen=True, eq=False)
class Line:
    """Holds one agent's requests, which follow each other.

    Attributes:
        name: The conversation's id at the client.
        parent: The id of the conversation that started it; empty: a user did.
        instructions: What the client says before everything else; the same in all sessions.
        tools: Functions with ``name``, ``description`` and ``parameters``; the same in all sessions.
        project: What the client adds of the user's project; the session's own.
    """

    name: str
    parent: str
    instructions: str
    tools: tuple[dict[str, Any], ...]
    project: str
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class AgentSession:
    """Holds a user's session: the main line, whose turns hold the sub-agents' lines.

    Attributes:
        start: Seconds after the run's begin at which it starts.
    """

    client: AgentClient
    line: Line
    start: float

    def lines(self) -> list[Line]:
        """Return the main line and those of all sub-agents."""
        return [self.line, *(sub for turn in self.line.turns for sub in turn.sub_agents)]


@dataclass(frozen=True)
class Shape:
    """Describes sessions. Lengths are tokens, times seconds.

    Attributes:
        turns: Fewest and most requests of a session's main line.
        system: Fewest and most tokens before the first user's words: instructions, tools and project.
        tool_gap: Median and spread (sigma of a lognormal) of the seconds that a tool runs.
        user_gap: The same for a user between two tasks.
        gaps: Least and most seconds of any gap.
        result: Median, spread, least and most tokens of a tool's result.
        answer: The same of an answer.
        user_share: Share of the requests that a user's words begin; the others follow a tool's result.
        branch_share: Share of these at which the user goes back to an earlier request of the session.
        fan_out_share: Share of the tool calls that start sub-agents.
    """

    turns: tuple[int, int] = (30, 100)
    system: tuple[int, int] = (15_000, 25_000)
    tool_gap: tuple[float, float] = (4.0, 1.4)
    user_gap: tuple[float, float] = (40.0, 0.9)
    gaps: tuple[float, float] = (1.0, 120.0)
    result: tuple[float, float, int, int] = (700.0, 1.3, 16, 6000)
    answer: tuple[float, float, int, int] = (150.0, 0.9, 16, 1500)
    user_share: float = 0.12
    branch_share: float = 0.2
    fan_out_share: float = 0.03
    sub_agents: tuple[int, int] = (1, 3)
    sub_turns: tuple[int, int] = (4, 12)


@dataclass(frozen=True)
class _Client:
    """Lengths of what a client sends before the conversation, in tokens."""

    instructions: int
    tools: tuple[str, ...]
    tool_tokens: int
    starts_agents: str
    """The tool that starts a sub-agent."""


_CLIENTS = {
    AgentClient.CLAUDE_CODE: _Client(
        3000,
        ("Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "TodoWrite", "WebFetch", "Write"),
        900,
        "Agent",
    ),
    AgentClient.CODEX: _Client(
        5000,
        ("exec_command", "write_stdin", "update_plan", "apply_patch", "view_image", "spawn_agent", "wait"),
        450,
        "spawn_agent",
    ),
    AgentClient.OPENCODE: _Client(
        3000,
        ("bash", "edit", "glob", "grep", "read", "task", "todowrite", "webfetch", "write"),
        700,
        "task",
    ),
}
_SUB_INSTRUCTIONS = 1500
_TASK_TOKENS = 300
_WORDS = 3000


class Writer:
    """Writes made-up text of about so many tokens."""

    def __init__(self, generator: random.Random, tokenizer: Tokenizer) -> None:
        self._random = generator
        syllables = ["".join(pair) for pair in itertools.product("bcdfglmnprstv", "aeiou")]
        self._words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(_WORDS)]
        self._tokens_per_word = 1.0
        sample = self.text(_SAMPLE_TOKENS)
        self._tokens_per_word = len(tokenizer.encode(sample, add_special_tokens=False).ids) / _SAMPLE_TOKENS

    def text(self, tokens: int) -> str:
        """Return lines of words; a few of them are numbers, names of files and of functions."""
        words = self._random.choices(self._words, k=max(1, round(tokens / self._tokens_per_word)))
        for at in range(0, len(words), 11):
            words[at] = f"\n{words[at]}_{words[at - 1]}({at % 97}):" if at else words[at].capitalize()
        return " ".join(words)


def make_sessions(
    count: int, clients: Sequence[AgentClient], shape: Shape, seed: int, tokenizer: Tokenizer
) -> list[AgentSession]:
    """Make sessions, whose clients take turns; the same arguments give the same sessions. They start within one mean
    user gap of each other."""
    preambles = {client: _preamble(client, Writer(random.Random(f"{client}"), tokenizer)) for client in clients}
    sessions = []
    for index in range(count):
        client = clients[index % len(clients)]
        generator = random.Random(f"agents/{seed}/{index}")
        maker = _Maker(shape, generator, Writer(generator, tokenizer), client, preambles[client])
        sessions.append(maker.session(generator.uniform(0, shape.user_gap[0])))
    return sessions


@dataclass(frozen=True)
class _Preamble:
    instructions: str
    sub_instructions: str
    tools: tuple[dict[str, Any], ...]
    tokens: int


def _preamble(client: AgentClient, writer: Writer) -> _Preamble:
    about = _CLIENTS[client]
    tools = tuple(
        {
            "name": name,
            "description": writer.text(about.tool_tokens * 3 // 4),
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": writer.text(about.tool_tokens // 8)}
                    for key in ("command", "description")
                },
                "required": ["command"],
            },
        }
        for name in about.tools
    )
    tokens = about.instructions + about.tool_tokens * len(tools)
    return _Preamble(writer.text(about.instructions), writer.text(_SUB_INSTRUCTIONS), tools, tokens)


class _Maker:
    """Makes one session."""

    def __init__(
        self, shape: Shape, generator: random.Random, writer: Writer, client: AgentClient, preamble: _Preamble
    ) -> None:
        self._shape = shape
        self._random = generator
        self._writer = writer
        self._client = client
        self._preamble = preamble
        self._first_sub: Turn | None = None

    def session(self, start: float) -> AgentSession:
        system = self._random.randint(*self._shape.system)
        project = self._writer.text(max(64, system - self._preamble.tokens))
        preamble = self._preamble
        line = Line(self._id(), "", preamble.instructions, preamble.tools, project)
        self._main(line, self._random.randint(*self._shape.turns))
        return AgentSession(self._client, line, start)

    def _main(self, line: Line, count: int) -> None:
        starts: list[Turn] = []  # the requests that a user's words began
        while len(line.turns) < count:
            last = line.turns[-1] if line.turns else None
            if last is None or self._random.random() < self._shape.user_share:
                turn = self._user_turn(last, starts)
                starts.append(turn)
            elif self._random.random() < self._shape.fan_out_share:
                turn = self._fan_out(line, last)
            else:
                turn = self._tool_turn(last)
            line.turns.append(turn)

    def _user_turn(self, last: Turn | None, starts: Sequence[Turn]) -> Turn:
        words = Message(Role.USER, self._writer.text(self._random.randint(20, 400)))
        if last is None:
            return Turn((words,), 0.0, self._answer())
        gap = self._gap(self._shape.user_gap)
        if len(starts) > 1 and self._random.random() < self._shape.branch_share:
            past = self._random.choice(starts[1:])
            kept = past.messages[:-1]
            return Turn((*kept, words), gap, self._answer(), past, len(kept), is_branch=True)
        said = Message(Role.ASSISTANT, self._writer.text(last.answer_tokens))
        return Turn((*last.messages, said, words), gap, self._answer(), last, len(last.messages))

    def _tool_turn(self, last: Turn) -> Turn:
        tool = self._random.choice([name for name in _CLIENTS[self._client].tools if name != self._starter])
        messages = (*last.messages, *self._exchange(last.answer_tokens, (tool,), self._shape.result))
        return Turn(messages, self._gap(self._shape.tool_gap), self._answer(), last, len(last.messages))

    def _fan_out(self, line: Line, last: Turn) -> Turn:
        count = self._random.randint(*self._shape.sub_agents)
        subs = tuple(self._sub_agent(line) for _ in range(count))
        self._first_sub = self._first_sub or subs[0].turns[0]
        messages = (
            *last.messages,
            *self._exchange(last.answer_tokens, (self._starter,) * count, self._shape.answer),
        )
        return Turn(messages, self._shape.gaps[0], self._answer(), last, len(last.messages), sub_agents=subs)

    def _sub_agent(self, parent: Line) -> Line:
        preamble = self._preamble
        tools = tuple(tool for tool in preamble.tools if tool["name"] != self._starter)
        line = Line(self._id(), parent.name, preamble.sub_instructions, tools, "")
        task = Message(Role.USER, self._writer.text(_TASK_TOKENS))
        # Sub-agents of one call start together, so that only those of earlier calls are in the session's past.
        line.turns.append(Turn((task,), self._shape.gaps[0], self._answer(), self._first_sub, 0))
        for _ in range(self._random.randint(*self._shape.sub_turns) - 1):
            line.turns.append(self._tool_turn(line.turns[-1]))
        return line

    @property
    def _starter(self) -> str:
        return _CLIENTS[self._client].starts_agents

    def _exchange(
        self, answer_tokens: int, tools: Sequence[str], result: tuple[float, float, int, int]
    ) -> list[Message]:
        """Return an answer that calls tools, and their results, whose lengths follow the law ``result``."""
        rest = max(16, answer_tokens - _CALL_TOKENS * len(tools))
        calls = tuple(
            ToolCall(
                f"call_{self._random.getrandbits(96):024x}",
                tool,
                json.dumps({"command": self._writer.text(rest // 2 // len(tools)), "description": "A step"}),
            )
            for tool in tools
        )
        results = [Message(Role.TOOL, self._writer.text(self._length(result)), answers=call.call_id) for call in calls]
        return [Message(Role.ASSISTANT, self._writer.text(rest // 2), calls), *results]

    def _answer(self) -> int:
        return self._length(self._shape.answer)

    def _length(self, law: tuple[float, float, int, int]) -> int:
        median, spread, least, most = law
        return round(min(max(self._random.lognormvariate(math.log(median), spread), least), most))

    def _gap(self, law: tuple[float, float]) -> float:
        least, most = self._shape.gaps
        return min(max(self._random.lognormvariate(math.log(law[0]), law[1]), least), most)

    def _id(self) -> str:
        text = f"{self._random.getrandbits(128):032x}"
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
