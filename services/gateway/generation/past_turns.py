"""Remembers the latest turns of each tenant's conversations: what the client sent, and the tokens of prompt and
answer."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from ..records.generate_request import Chat
from ..records.volatile_lines import steady

MAX_BYTES = 64 << 20
"""Limits what a mesh's turns take in memory: about 600 conversations of 25,000 tokens. The tenant with the most bytes
loses its oldest turn first."""
MAX_SECONDS = 3600.0
"""A turn that no other one has followed is forgotten after this time."""
MAX_CHAT_BYTES = 2 << 20
"""Larger conversations are not remembered: to read one again would hold up the event loop for milliseconds."""
TOKEN_BYTES = 4
_ROOT_TOKENS = 64
"""Turns of one conversation under different salts are found by their first tokens."""


@dataclass(frozen=True, slots=True)
class PastMessage:
    """Describes a message without its text.

    Attributes:
        role: Who speaks.
        content: Digest of all but the reasoning.
        reasoning: Digest of the reasoning; empty without any.
        steady: Of a system prompt, the digest without the lines that clients change; otherwise empty.
    """

    role: str
    content: bytes
    reasoning: bytes = b""
    steady: bytes = b""


@dataclass(frozen=True, slots=True)
class ChatDigest:
    """Describes a conversation as the client sent it.

    Attributes:
        messages: In their order.
        tools: Digest of the tools.
        variables: Digest of the chat template's variables.
    """

    messages: tuple[PastMessage, ...]
    tools: bytes
    variables: bytes


class _Message(msgspec.Struct):
    role: str
    content: str = ""
    reasoning_content: str = ""


_read_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_messages = msgspec.json.Decoder(list[_Message]).decode
_encode = msgspec.json.Encoder().encode


def digest_of(chat: Chat) -> ChatDigest:
    """Describe a conversation."""
    messages = []
    for raw, message in zip(_read_raw(chat.messages_json), _read_messages(chat.messages_json), strict=True):
        content, reasoning, steadied = bytes(raw), b"", b""
        if message.reasoning_content:
            members = msgspec.json.decode(raw)
            reasoning = _digest(members.pop("reasoning_content").encode())
            content = _encode(members)
        elif message.role in ("system", "developer"):
            steadied = _digest(steady(message.content).encode())
        messages.append(PastMessage(message.role, _digest(content), reasoning, steadied))
    return ChatDigest(tuple(messages), _digest(chat.tools_json), _digest(chat.template_kwargs_json))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class GeneratedSpan:
    """Locates generated tokens in a turn, which replaced those of a fresh tokenization.

    Attributes:
        start, end: Their positions.
        fresh: The tokens that they replaced, 4 bytes each; empty for the answer, which the next turn will write.
    """

    start: int
    end: int
    fresh: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """Describes a turn that has ended.

    Attributes:
        answer: The id of its answer.
        chat: What the client sent.
        tokens: Prompt and answer, 4 bytes a token.
        num_prompt: Tokens of the prompt.
        spans: The generated tokens; the last ones are the answer.
        hashes: Prefixes of the hashes of the prompt's KV blocks, as ``Submit.block_hash_prefixes`` has them.
        salt: Of these hashes; that of the adapter is in it.
        adapter: Digest of the adapter; empty without one.
        engine: The engine that has its KV blocks.
        num_reasoning: Reasoning tokens of the answer, without the marks around them.
        opens_reasoning: Whether the prompt has opened the reasoning.
        session: The client's name for its session; empty: it gave none.
    """

    answer: str
    chat: ChatDigest
    tokens: bytes
    num_prompt: int
    spans: tuple[GeneratedSpan, ...]
    hashes: Sequence[int]
    salt: bytes
    adapter: bytes
    engine: str
    num_reasoning: int
    opens_reasoning: bool
    session: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """An estimate of what it takes in memory."""
        spans = sum(len(span.fresh) + 100 for span in self.spans)
        return len(self.tokens) + spans + 150 * len(self.chat.messages) + 120 * len(self.hashes) + 1000


@dataclass(slots=True)
class _Shelf:
    """Holds the turns of one tenant, the oldest first, each with the time when it ended."""

    turns: OrderedDict[str, tuple[PastTurn, float]] = field(default_factory=OrderedDict)
    by_hash: dict[int, PastTurn] = field(default_factory=dict)
    by_root: dict[bytes, PastTurn] = field(default_factory=dict)
    num_bytes: int = 0


class PastTurns:
    """Finds the turn that a prompt continues, among those of its own tenant."""

    def __init__(self, clock: Callable[[], float], *, max_bytes: int = MAX_BYTES) -> None:
        """``clock``: returns seconds."""
        self._clock = clock
        self._max_bytes = max_bytes
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(len(shelf.turns) for shelf in self._shelves.values())

    def find(self, tenant: str, tokens: bytes, hashes: Sequence[int]) -> PastTurn | None:
        """Return the latest of the turns that share the most blocks with a prompt or, if none shares one, one that
        begins alike under another salt; None without either."""
        shelf = self._shelf(tenant)
        if shelf is None:
            return None
        for each in reversed(hashes):
            if (turn := shelf.by_hash.get(each)) is not None:
                return turn
        return shelf.by_root.get(_root(tokens))

    def of_answer(self, tenant: str, answer: str) -> PastTurn | None:
        """Return the turn with an answer; None if it is not remembered."""
        shelf = self._shelf(tenant)
        turn, _ = (None, 0.0) if shelf is None else shelf.turns.get(answer, (None, 0.0))
        return turn

    def put(self, tenant: str, turn: PastTurn, before: PastTurn | None) -> None:
        """Remember a turn. ``before``: the turn whose whole prompt it continues, which it replaces."""
        if self._shelves:  # a tenant that asks no more loses its turns too: each call looks at one
            first = next(iter(self._shelves))
            self._shelves.move_to_end(first)
            self._shelf(first)
        shelf = self._shelves.setdefault(tenant, _Shelf())
        for former in (before, shelf.turns.get(turn.answer, (None,))[0]):
            if former is not None:
                self._drop(shelf, former)
        if turn.num_bytes <= self._max_bytes:
            shelf.turns[turn.answer] = turn, self._clock()
            shelf.by_hash |= dict.fromkeys(turn.hashes, turn)
            shelf.by_root[_root(turn.tokens)] = turn
            shelf.num_bytes += turn.num_bytes
            self._num_bytes += turn.num_bytes
        self._drop_surplus()

    def _shelf(self, tenant: str) -> _Shelf | None:
        """Return the shelf of a tenant without what is too old."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        oldest = self._clock() - MAX_SECONDS
        while shelf.turns:
            turn, ended = next(iter(shelf.turns.values()))
            if ended >= oldest:
                return shelf
            self._drop(shelf, turn)
        del self._shelves[tenant]
        return None

    def _drop_surplus(self) -> None:
        while self._num_bytes > self._max_bytes:
            tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].num_bytes)
            self._drop(shelf, next(iter(shelf.turns.values()))[0])
            if not shelf.turns:
                del self._shelves[tenant]

    def _drop(self, shelf: _Shelf, turn: PastTurn) -> None:
        if shelf.turns.pop(turn.answer, None) is None:
            return
        shelf.num_bytes -= turn.num_bytes
        self._num_bytes -= turn.num_bytes
        for each in turn.hashes:
            if shelf.by_hash.get(each) is turn:
                del shelf.by_hash[each]
        if shelf.by_root.get(root := _root(turn.tokens)) is turn:
            del shelf.by_root[root]


def _root(tokens: bytes) -> bytes:
    return _digest(tokens[: _ROOT_TOKENS * TOKEN_BYTES])


def num_common(one: bytes, other: bytes) -> int:
    """Return how many tokens two sequences begin with alike."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one[: high * TOKEN_BYTES] == other[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # equal up to low, different before high
        middle = (low + high) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if one[part] == other[part] else (low, middle)
    return low
