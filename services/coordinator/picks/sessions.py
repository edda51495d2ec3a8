"""Recognises the turns of sessions: where the KV of the turns before lies, and when the next one is likely. No I/O.

A session is a conversation of an agent, which sends all of it again with each turn. Clients name it by an id, which is
only a hint; without one a long prompt is recognised by the block hashes that it shares with an earlier prompt of its
tenant. What is known is soft state: a new coordinator learns it anew from the next turns, and answers never depend on
it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tokenloom.request.prefix_schedule import LEADING_BLOCKS, MAX_HASHES, SESSION_HASHES
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, PickRequest
from tokenloom.v1.engine_pb2 import SessionTurn
from tokenloom.v1.types_pb2 import EngineRole

from ..prefixes.hash_table import Words, words_of

MAX_BRANCHES = 8192
"""Lines of turns that are remembered; the one whose last turn is oldest is forgotten first."""
MAX_TENANT_BRANCHES = 1024
"""Those of one tenant, which take no more than 5 MiB."""
MAX_SESSION_BRANCHES = 16
"""Lines of one session that a prompt is compared with, those whose last turns are latest: one that waits for sub-agents
which it has started side by side (agents start up to ten) is among them."""
TURNS = 16
"""Turns of a line at whose ends another line may begin."""
FORGET_SECONDS = 1800.0
"""A session whose next turn has not come after so long is forgotten."""
_NEW_SHARE = 0.25
"""Weight of the latest interval in the means of a line's intervals."""
_LEAST_INTERVAL = 0.001
"""Seconds that count for a shorter interval."""
MAX_SPREAD = 0.7
"""Mean distance of the logarithms of a line's intervals from their mean up to which the next one can be predicted: they
are within a factor of two. Of tools that take a second now and two minutes then, no mean says when they end."""
_MAX_LOST = 4
"""Lines that an id may begin without a second turn before it counts as one that says nothing, such as the name of an
application that all its requests carry."""
_SLACK_BLOCKS = 2
"""By so many blocks a turn may differ from the end of the prompt before, and by its last one that is named: templates
open an answer with tokens that they leave out of the history."""
_LEAST_TOKENS = 16
"""A turn without a client's id is longer than the one before by so many tokens at least, for an answer and another
message: questions that follow a common beginning are as long as each other."""
_AT_ENDS = (1, 2, 4)
"""Positions, from the end of a prompt, of the hashes by which it is found again."""

_DECODE = EngineRole.ENGINE_ROLE_DECODE


class Intervals(NamedTuple):
    """Describes the times between the beginnings of a line's turns. ``mean``: the geometric one, in seconds;
    ``spread``: the mean distance of their logarithms from its; ``num``: how many there were."""

    mean: float = 1.0
    spread: float = 0.0
    num: int = 0

    def with_one(self, seconds: float) -> "Intervals":
        """Return them with one more."""
        seconds = max(seconds, _LEAST_INTERVAL)
        if not self.num:
            return Intervals(seconds, 0.0, 1)
        distance = math.log(seconds / self.mean)
        spread = self.spread + (abs(distance) - self.spread) * (_NEW_SHARE if self.num > 1 else 1.0)
        return Intervals(self.mean * math.exp(_NEW_SHARE * distance), spread, self.num + 1)

    @property
    def next(self) -> float:
        """Seconds after which the next turn is likely; 0: it may come at any time, as far as they say."""
        return self.mean if self.num > 1 and self.spread <= MAX_SPREAD else 0.0


@dataclass(slots=True, eq=False)
class _Session:
    """Holds what the lines of one id have in common; ``key`` 0: it has one line, which no client has named."""

    key: int
    branches: list["_Branch"] = field(default_factory=list)  # the latest turn last
    num_lost: int = 0  # lines in a row that began without another one's second turn


@dataclass(slots=True, eq=False)
class _Branch:
    """Holds one line of turns: the prompt of each begins with the one before."""

    number: int
    tenant: str
    session: _Session
    words: Words  # of the latest prompt
    prompt_tokens: int
    began_at: float  # the latest turn
    engine: EngineRef
    points: deque[int]  # words at the ends of its latest turns, under which it is found
    intervals: Intervals
    keeps: bool = False  # whether the client wants the latest prompt kept
    num_turns: int = 1
    counted: tuple[EngineRef, int] | None = None  # the engine that it is expected on, with its tokens

    @property
    def is_expected(self) -> bool:
        """Whether anything says that another turn follows."""
        is_named = bool(self.session.key) and self.session.num_lost <= _MAX_LOST
        return self.num_turns > 1 or self.keeps or is_named


@dataclass(slots=True, eq=False)
class _Tenant:
    """Holds the sessions of a tenant: no other tenant's request ever meets them."""

    branches: OrderedDict[int, _Branch] = field(default_factory=OrderedDict)  # by number, the latest turn last
    sessions: dict[int, _Session] = field(default_factory=dict)  # by the client's id
    points: dict[int, _Branch] = field(default_factory=dict)


class PointFilter:
    """Says which words may be points of a tenant: of a prompt of 256 only a few have to be looked for."""

    _BITS, _WORD_BITS = 18, 64  # a quarter of a million places; all tenants together have some 25,000 points

    def __init__(self) -> None:
        self._shift = self._WORD_BITS - self._BITS
        self._shifts = np.array(self._shift, np.uint64)
        self._counts = np.zeros(1 << self._BITS, np.int32)

    def add(self, word: int) -> None:
        """Note a further point."""
        self._counts[word >> self._shift] += 1

    def remove(self, word: int) -> None:
        """Forget a point that was added."""
        self._counts[word >> self._shift] -= 1

    def possible(self, words: Words) -> list[int]:
        """Return the positions of words that may be points, growing."""
        found: list[int] = self._counts.take(words >> self._shifts).nonzero()[0].tolist()
        return found


class Turn(NamedTuple):
    """Describes a request as a turn of a session, before it is placed.

    Attributes:
        words: Of the blocks of its prompt.
        branch: The line with which it has most in common; None: there is none.
        session: The session that its client names; None: it names none, or a new one.
        num_common: Leading hashes that its prompt shares with the latest one of that line.
        is_next: Whether it goes on with that line, rather than beginning another one.
        is_repeated: Whether it is that line's latest turn once more: another attempt, or another leg.
    """

    words: Words
    branch: _Branch | None
    session: _Session | None
    num_common: int
    is_next: bool
    is_repeated: bool

    @property
    def engine(self) -> EngineRef | None:
        """The engine on which that line's KV lies."""
        return None if self.branch is None else self.branch.engine

    @property
    def counted_tokens(self) -> int:
        """Tokens by which that line counts on its engine."""
        return self.branch.counted[1] if self.branch is not None and self.branch.counted is not None else 0

    @property
    def returns(self) -> bool:
        """Whether it is to run where that line's KV lies. One that only shares a beginning, such as a system prompt,
        with another prompt is not: other engines have that too."""
        return self.is_next or self.is_repeated or self.session is not None

    @property
    def num_blocks(self) -> int:
        """Leading blocks of the prompt that it shares with an earlier one, as far as hashes name them."""
        return LEADING_BLOCKS[self.num_common]


class SessionTable:
    """Remembers the sessions of all tenants."""

    def __init__(
        self, clock: Callable[[], float], on_tokens: Callable[[EngineRef, int], None], first_branch: int = 1
    ) -> None:
        """``clock`` returns seconds, of any beginning. ``on_tokens`` is called with an engine and by how many tokens
        the prompts of the sessions whose next turns are expected there have grown, below 0: shrunk. ``first_branch``:
        number of the first line; engines outlive coordinators, whose numbers must not meet there."""
        self._clock = clock
        self._on_tokens = on_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._branches: OrderedDict[int, _Branch] = OrderedDict()  # by number, the latest turn last
        self._next_number = first_branch
        self._filter = PointFilter()

    def __len__(self) -> int:
        return len(self._branches)

    def tokens_on(self, engine: EngineRef) -> int:
        """Return the tokens of the sessions whose next turns are expected on an engine. Looks at all lines."""
        counts = (branch.counted for branch in self._branches.values())
        return sum(counted[1] for counted in counts if counted is not None and counted[0] == engine)

    def find(self, request: PickRequest, words: Words | None = None) -> Turn | None:
        """Return which turn of which session a request is; None if it is of none that could be recognised later.
        ``words``: of its hashes, if they are known."""
        num_hashes = len(request.block_hash_prefixes) if words is None else len(words)
        if request.pools or not (request.session or request.keep_seconds or num_hashes >= SESSION_HASHES):
            return None
        if words is None:
            words = words_of(request.block_hash_prefixes[:MAX_HASHES])
        self._forget_old()
        if (tenant := self._tenants.get(request.tenant)) is None:
            return Turn(words, None, None, 0, False, False)
        session = tenant.sessions.get(request.session) if request.session else None
        common, branch = 0, None
        for each in session.branches if session is not None else ():
            if (length := _common(each.words, words)) >= common:
                common, branch = length, each
        if not common and (found := self._found_at(tenant.points, words)) is not None:
            common, branch = _common(found.words, words), found
        if branch is None:
            return Turn(words, None, session, 0, False, False)
        has_grown = session is not None or request.prompt_tokens >= branch.prompt_tokens + _LEAST_TOKENS
        is_next = has_grown and bool(common) and _reaches_end(common, len(branch.words))
        # Behind the last block that is named, prompts of a line differ in their length alone.
        is_same = common == len(branch.words) == len(words)
        is_again = is_same and (request.prompt_tokens == branch.prompt_tokens or bool(request.exclude))
        return Turn(words, branch, session, common, is_next, is_again or (is_same and request.role == _DECODE))

    def note(
        self, turn: Turn, request: PickRequest, engine: EngineIdentity, *, in_store: bool = False
    ) -> SessionTurn | None:
        """Remember where a turn was placed. Return what the engine and the caller learn of it; None while nothing says
        that another turn follows. ``in_store``: the engine can load from a store what the one before has."""
        placed = EngineRef(engine_id=engine.engine_id, epoch=engine.epoch)
        moved = turn.engine is not None and turn.engine != placed
        branch = turn.branch
        if branch is None or not (turn.is_next or turn.is_repeated):
            branch = self._begin(turn, request, placed)
        elif not turn.is_repeated:
            self._continue(branch, turn, request, placed)
        elif request.role != _DECODE:
            branch.engine = placed
        branch.keeps = bool(request.keep_seconds)
        self._count(branch)
        if not branch.is_expected:
            return None
        past_tokens = min(turn.num_blocks * engine.fingerprint.block_size, request.prompt_tokens)
        moved = moved and bool(past_tokens)
        return SessionTurn(
            branch=branch.number,
            return_milliseconds=round(1000 * branch.intervals.next),
            past_tokens=past_tokens,
            moved=moved,
            from_store=moved and in_store,
            keep_seconds=request.keep_seconds,
        )

    def _begin(self, turn: Turn, request: PickRequest, engine: EngineRef) -> _Branch:
        """Remember another line; it is expected to go on as the one from which it branches off."""
        if (tenant := self._tenants.get(request.tenant)) is None:
            tenant = self._tenants[request.tenant] = _Tenant()
        session = turn.session or _Session(request.session)
        if session.key:
            tenant.sessions[session.key] = session
        session.num_lost += 1
        branch = _Branch(
            number=self._next_number,
            tenant=request.tenant,
            session=session,
            words=turn.words,
            prompt_tokens=request.prompt_tokens,
            began_at=self._clock(),
            engine=engine,
            points=deque(),
            intervals=turn.branch.intervals if turn.branch is not None and turn.num_common else Intervals(),
        )
        self._next_number += 1
        session.branches.append(branch)
        self._branches[branch.number] = tenant.branches[branch.number] = branch
        self._add_points(tenant, branch)
        if len(session.branches) > MAX_SESSION_BRANCHES:
            self._forget(session.branches[0])
        if len(tenant.branches) > MAX_TENANT_BRANCHES:
            self._forget(next(iter(tenant.branches.values())))
        if len(self._branches) > MAX_BRANCHES:
            self._forget(next(iter(self._branches.values())))
        return branch

    def _continue(self, branch: _Branch, turn: Turn, request: PickRequest, engine: EngineRef) -> None:
        """Remember the next turn of a line."""
        tenant, session, now = self._tenants[branch.tenant], branch.session, self._clock()
        if request.session and not session.key and request.session not in tenant.sessions:
            session.key = request.session  # its client names it from now on
            tenant.sessions[session.key] = session
        branch.intervals = branch.intervals.with_one(now - branch.began_at)
        branch.num_turns += 1
        session.num_lost = 0
        # The line that began first is mostly the main one, which goes on: it is not the first to be forgotten.
        session.branches.remove(branch)
        session.branches.append(branch)
        branch.began_at = now
        branch.engine = engine
        branch.prompt_tokens = request.prompt_tokens
        branch.words = turn.words
        self._branches.move_to_end(branch.number)
        tenant.branches.move_to_end(branch.number)
        self._add_points(tenant, branch)

    def _count(self, branch: _Branch) -> None:
        """Let a line count where its next turn is expected."""
        if branch.counted is not None:
            engine, tokens = branch.counted
            self._on_tokens(engine, -tokens)
        branch.counted = (branch.engine, branch.prompt_tokens) if branch.is_expected else None
        if branch.counted is not None:
            self._on_tokens(*branch.counted)

    def _add_points(self, tenant: _Tenant, branch: _Branch) -> None:
        points = branch.points
        for at in _AT_ENDS:
            if at > len(branch.words):
                break
            word = branch.words.item(-at)
            if (holder := tenant.points.get(word)) is branch:
                continue
            if holder is None:
                self._filter.add(word)
            tenant.points[word] = branch
            points.append(word)
        while len(points) > TURNS * len(_AT_ENDS):
            self._drop_point(tenant, branch, points.popleft())

    def _drop_point(self, tenant: _Tenant, branch: _Branch, point: int) -> None:
        if tenant.points.get(point) is branch:  # otherwise another line has ended there since
            del tenant.points[point]
            self._filter.remove(point)

    def _found_at(self, points: dict[int, _Branch], words: Words) -> _Branch | None:
        """Return the line whose end is furthest in a prompt."""
        for at in reversed(self._filter.possible(words)):
            if (branch := points.get(words.item(at))) is not None:
                return branch
        return None

    def _forget_old(self) -> None:
        """Forget the sessions whose time is over."""
        oldest = self._clock() - FORGET_SECONDS
        while self._branches and (branch := next(iter(self._branches.values()))).began_at < oldest:
            self._forget(branch)

    def _forget(self, branch: _Branch) -> None:
        tenant, session = self._tenants[branch.tenant], branch.session
        del self._branches[branch.number], tenant.branches[branch.number]
        if branch.counted is not None:
            engine, tokens = branch.counted
            self._on_tokens(engine, -tokens)
        for point in branch.points:
            self._drop_point(tenant, branch, point)
        session.branches.remove(branch)
        if not session.branches:
            tenant.sessions.pop(session.key, None)
        if not tenant.branches:
            del self._tenants[branch.tenant]


def _reaches_end(common: int, count: int) -> bool:
    """Return whether so many equal hashes of a prompt are all of its ``count`` but for what an answer replaces."""
    return common >= count - 1 or LEADING_BLOCKS[count] - LEADING_BLOCKS[common] <= _SLACK_BLOCKS


def _common(ours: Words, theirs: Words) -> int:
    """Return how many leading words two prompts share. Hashes are chained: behind the first difference none is
    equal."""
    if not (shorter := min(len(ours), len(theirs))):
        return 0
    differ = ours[:shorter] != theirs[:shorter]
    first = int(differ.argmax())
    return first if differ[first] else shorter
