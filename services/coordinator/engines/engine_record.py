"""Keeps what the coordinator knows of one engine: its last report and the picks on their way, and decides when it
counts as dead. Remembers what an engine has to compute for the picks in its queue. Checks what engines report before
the coordinator computes with it: one faulty engine must not harm the others. Measures their silence by a clock that
leaves out the coordinator's own pauses."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NoReturn

from tokenloom.request.errors import Aborted, FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.peers.hello import MAX_REVISION
from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.placement.pool import longest_request
from tokenloom.services.runtime.placement.prefix_homes import name_hash
from tokenloom.services.runtime.placement.rules import load_score
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState
from tokenloom.v1.types_pb2 import EngineRole

from ..picks.placed import engine_part

PICK_SECONDS = 2.0
"""How long a pick counts that the engine never acknowledges: its output processor died or placed elsewhere."""
LATE_SECONDS = 3.0
"""An engine reports at least every second; one that is silent for so long gets requests only if no other engine can
take them: its event loop is busy."""
SILENT_SECONDS = 10.0
"""An engine that is silent for so long counts as dead. The stream of one that was stopped or cut off ends earlier."""
STANDSTILL_SECONDS = 60.0
"""Far longer than any step: an engine with work to do whose step does not change for so long hangs."""
TICK_SECONDS = 0.1
LONGEST_TICK_SECONDS = 0.25
"""As long as a turn of the event loop counts at most for a clock that runs: the reports that arrived during a longer
one have not been read yet, and their engines are not silent. A report is read within a few turns; so many of them count
for less than the time after which an engine is late."""
OTHER_WEIGHTS = "other_weights"
"""The fall-back of an engine that waits aside (:mod:`.model_claims`)."""
MAX_REQUESTS = 1 << 24
"""Bound of each count of requests. It is far above what an engine holds, and scores of four times as many, with the
coordinator's own picks, fit into 32 bits."""
MAX_BLOCK_SIZE = 1 << 20
"""Bound of the tokens of a block: tokens of all blocks, of which there are less than 2^32, fit into 64 bits."""

_NO_ROLE, _NO_STATE = EngineRole.ENGINE_ROLE_UNSPECIFIED, EngineState.ENGINE_STATE_UNSPECIFIED
_ROLES, _STATES = frozenset(EngineRole.values()) - {_NO_ROLE}, frozenset(EngineState.values()) - {_NO_STATE}
_COUNTS = ("waiting", "running", "seats", "group_size")
_RATES = (
    "kv_usage",
    "prefill_tokens_per_second",
    "starts_per_second",
    "computed_tokens_per_second",
    "prompt_tokens_per_second",
    "step_seconds",
    "step_requests",
)
_counts_of, _rates_of = attrgetter(*_COUNTS), attrgetter(*_RATES)
_DEAD = EngineState.ENGINE_STATE_DEAD
_PAUSED = EngineState.ENGINE_STATE_PAUSED
_SERVING = EngineState.ENGINE_STATE_SERVING


def check_identity(report: EngineReport) -> None:
    """Check the first report of a stream. Raises ``InvalidArgument``."""
    identity = report.identity
    if not identity.engine_id:
        raise InvalidArgument("identity.engine_id is empty", "identity.engine_id")
    if identity.epoch != report.hello.epoch:
        raise InvalidArgument("identity.epoch differs from the hello's", "identity.epoch")
    if not identity.address:
        raise InvalidArgument("identity.address is empty", "identity.address")
    has_kv = report.role != EngineRole.ENGINE_ROLE_ENCODE
    if has_kv and (identity.num_kv_blocks == 0 or identity.fingerprint.block_size == 0):
        raise InvalidArgument("identity must state the size of the KV cache", "identity.num_kv_blocks")
    if identity.fingerprint.block_size > MAX_BLOCK_SIZE:
        field = "identity.fingerprint.block_size"
        raise InvalidArgument(f"{field} must be at most {MAX_BLOCK_SIZE}, not {identity.fingerprint.block_size}", field)
    check_report(report)


def check_report(report: EngineReport) -> None:
    """Check any report. Raises ``InvalidArgument``."""
    if report.role not in _ROLES:
        raise InvalidArgument("role is missing or unknown", "role")
    if report.state not in _STATES:
        raise InvalidArgument("state is missing or unknown", "state")
    if report.HasField("join") and max(report.join.incarnation, report.join.desired.revision) >= MAX_REVISION:
        raise InvalidArgument(f"join.incarnation and join.desired.revision must be below {MAX_REVISION}", "join")
    # One comparison for all fields, since 5,000 reports arrive in a second; the field is only named for the error.
    if max(_counts_of(report)) > MAX_REQUESTS:
        name = next(name for name in _COUNTS if getattr(report, name) > MAX_REQUESTS)
        raise InvalidArgument(f"{name} must be at most {MAX_REQUESTS}, not {getattr(report, name)}", name)
    rates = _rates_of(report)
    if not (min(rates) >= 0 and sum(rates) < math.inf):  # the sum of one that is no number is none either
        name, rate = next((name, rate) for name, rate in zip(_RATES, rates, strict=True) if not 0 <= rate < math.inf)
        raise InvalidArgument(f"{name} must be a finite number and not negative, not {rate}", name)


def check_name(holder: "EngineRecord", first: EngineReport, now: float) -> None:
    """Check that an engine may join under the name of ``holder``, by its first report. ``now``: seconds. Raises
    ``FailedPrecondition`` while the holder has the name, and ``Aborted`` if the holder has come later."""
    identity, ours = first.identity, first.join
    if identity.epoch == holder.identity.epoch:
        return
    where = f"the engine at {holder.identity.address} on {holder.identity.host or 'an unknown host'}"
    if ours.incarnation:  # each process that joins gets a larger number, so that it is known who came last
        if ours.incarnation < holder.incarnation:
            raise Aborted(f"the name {identity.engine_id!r} has passed on to {where}")
        return
    # A supervisor starts a process when the one before has ended. Of any other one the end is not known, and two that
    # overtook each other by turns answered no request.
    if (ours.supervisor and ours.supervisor == holder.first.join.supervisor) or holder.is_lost(now):
        return
    raise FailedPrecondition(
        f"the name {identity.engine_id!r} belongs to {where} until that one leaves, or has not reported for "
        f"{SILENT_SECONDS:g} s. Give each engine a name of its own (--instance-id)"
    )


class ArrivedPicks:
    """Keeps the uncached prompt tokens of the picks that wait at an engine.

    An engine reports the prompt tokens of its queue, but knows only when a request begins which of them are cached. The
    coordinator estimated that when it picked. Requests begin in the order of their arrival, so of the picks that have
    arrived, those wait that came last.
    """

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()  # as many as the engine has waiting requests, after each report
        self._total = 0

    def add(self, uncached_tokens: int) -> None:
        """Append a pick that has arrived."""
        self._tokens.append(uncached_tokens)
        self._total += uncached_tokens

    def trim(self, num_waiting: int) -> None:
        """Drop the picks that wait no more."""
        # The queue is taken in order, so the oldest have begun. A rate of the whole queue would not do instead: most of
        # its tokens may turn out to be cached.
        while len(self._tokens) > num_waiting:
            self._total -= self._tokens.popleft()

    def uncached_tokens(self, report: EngineReport) -> float:
        """Return the prompt tokens to compute for all requests that wait. Those of which nothing is known, because
        other coordinators placed them, count in full."""
        num_unknown = report.waiting - len(self._tokens)
        return self._total + (report.waiting_tokens * num_unknown / report.waiting if num_unknown > 0 else 0)


class EngineRecord:
    """Describes one incarnation of an engine. Times are seconds of one monotonic clock, given by the caller.

    What picks compare is kept in the engine's row of ``columns``; only the newest record of a name writes there.

    Attributes:
        report: The last one.
        shown: What snapshots show of it.
        answer_part: The engine in answers to picks.
        row: Its row of the columns.
        own_state: What it reports, unless it fell silent or hangs.
        waits_aside: Why it gets no requests although it serves; empty: it gets some.
        waited_aside: Whether it waited aside at the former coordinator, by its first report.
        lost_picks: Picks in a row that never arrived here.
        first: Its first report.
        incarnation: Its number among all processes that have joined.
        is_fresh: Whether it is as engines are after a start: it has not been asked to reach any other state.
        wanted_revision: The state that it has to reach before it gets requests; 0: it may be in any.
        weights_version: The state since which it should have the weights of all engines; 0: there are none.
        takes_weights: False: it was started with other weights since, and keeps those.
        fingerprint_bytes: Its fingerprint, serialized.
        adapters: Digests of the LoRA adapters that it has loaded.
    """

    def __init__(
        self, identity: EngineIdentity, report: EngineReport, now: float, columns: EngineColumns, row: int
    ) -> None:
        self.identity = identity
        self.answer_part = engine_part(identity)
        self.report = report
        self.row = row
        self.adapters: frozenset[bytes] = frozenset()
        self.own_state = report.state
        self.waits_aside = ""
        self.waited_aside = any(each.kind == OTHER_WEIGHTS for each in report.fall_backs)
        self.lost_picks = 0
        self.first = report
        self.incarnation = self.wanted_revision = self.weights_version = 0
        self.takes_weights = True
        self.is_fresh = self.follows and not report.join.incarnation
        self.fingerprint_bytes = identity.fingerprint.SerializeToString(deterministic=True)
        self._columns = columns
        self.shown = EngineReport()
        # Prompt tokens of the picks on their way, by number: all, and uncached. As many as are picked within
        # PICK_SECONDS, in two dictionaries: a tuple for each would be one more object for the garbage collector.
        self._counted: dict[int, int] = {}
        self._uncached: dict[int, int] = {}
        self._counted_tokens = self._counted_uncached = 0
        self._queue = ArrivedPicks()
        columns.max_tokens[row] = longest_request(identity)
        columns.block_size[row] = identity.fingerprint.block_size
        columns.name_hash[row] = name_hash(f"{identity.engine_id} {identity.epoch}")
        columns.begin_turns(row)
        columns.progressed_at[row] = now
        self._take(report, now)

    @property
    def state(self) -> EngineState:
        """What snapshots show: an engine that waits aside is not serving."""
        # A paused engine takes no new picks, because they would wait for its resume; what was placed there before
        # waits. Engines with other weights are shown the same way, as older output processors understand it.
        return _PAUSED if self.is_aside and self.own_state == _SERVING else self.own_state

    @property
    def is_aside(self) -> bool:
        """Whether only requests that began with its weights may go on here, while it serves."""
        return bool(self.waits_aside) or self.lacks_weights

    @property
    def lacks_weights(self) -> bool:
        """Whether it has yet to load the weights of all engines."""
        return self.report.progress.reached < self.weights_version

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache holds."""
        return self.identity.num_kv_blocks * self.identity.fingerprint.block_size

    @property
    def score(self) -> int:
        """waiting * 4 + running, counted picks included."""
        return load_score(self.num_waiting, self.report.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait there, counted picks included."""
        return self.report.waiting + len(self._counted)

    @property
    def waiting_tokens(self) -> int:
        """Their prompt tokens that are not computed yet."""
        return self.report.waiting_tokens + self._counted_tokens

    @property
    def is_late(self) -> bool:
        """Whether its last report is older than it should be."""
        return bool(self._columns.is_late[self.row])

    @property
    def is_in_state(self) -> bool:
        """Whether it has reached the state that it must be in."""
        return self.report.progress.reached >= self.wanted_revision and not self.lacks_weights

    @property
    def follows(self) -> bool:
        """Whether it takes the state that an operator wants; one of an older release does not."""
        return self.first.HasField("join")

    @property
    def can_load_adapters(self) -> bool:
        return self.identity.limits.max_lora_rank > 0

    def update(self, report: EngineReport, coordinator_epoch: int, now: float) -> bool:
        """Take a report. Returns False when nothing of interest changed: only the number of the step."""
        previous, shown_before, num_counted = self.report, self.shown, len(self._counted)
        if report.step != previous.step or report.running + report.waiting == 0 or previous.state == _PAUSED:
            self._columns.progressed_at[self.row] = now
        if report.adapters or self.adapters:
            self.adapters = frozenset(adapter.digest for adapter in report.adapters)
        self.shown = _shown(report)
        if report.picks_arrived:
            self.lost_picks = 0
        for pick in report.picks_arrived:
            if pick.coordinator_epoch == coordinator_epoch:  # otherwise a former coordinator's
                self._queue.add(self._uncount(pick.number)[1])
        self._queue.trim(report.waiting)
        self._take(report, now)
        return shown_before != self.shown or num_counted != len(self._counted)

    def count(self, number: int, prompt_tokens: int, uncached_tokens: int) -> None:
        """Count a leg that was placed here until a report names exactly this pick or :meth:`expire` is called for
        it."""
        self._counted[number] = prompt_tokens
        self._uncached[number] = uncached_tokens
        self._counted_tokens += prompt_tokens
        self._counted_uncached += uncached_tokens
        columns, row = self._columns, self.row
        columns.last_turn[row] = number
        columns.waiting[row] += 1
        columns.waiting_tokens[row] += prompt_tokens
        columns.uncached_tokens[row] += uncached_tokens
        columns.free_tokens[row] -= prompt_tokens

    def expire(self, number: int) -> bool:
        """Forget a pick that never arrived. Returns whether it was still counted."""
        if number not in self._counted:
            return False
        prompt_tokens, uncached_tokens = self._uncount(number)
        columns, row = self._columns, self.row
        columns.waiting[row] -= 1
        columns.waiting_tokens[row] -= prompt_tokens
        columns.uncached_tokens[row] -= uncached_tokens
        columns.free_tokens[row] += prompt_tokens
        self.lost_picks += 1
        return True

    def refresh(self, now: float) -> bool:
        """Mark the engine as dead if it has been silent, or has made no progress, for too long; as late before that.
        Returns whether the state changed."""
        before = self.own_state
        columns, row = self._columns, self.row
        hangs = now - columns.progressed_at[row] > STANDSTILL_SECONDS and self.report.state != _PAUSED
        silence = now - columns.reported_at[row]
        if (is_late := bool(silence > LATE_SECONDS)) != columns.is_late[row]:
            columns.set_late(row, is_late)
        self.own_state = _DEAD if hangs or silence > SILENT_SECONDS else self.report.state
        if self.own_state == _SERVING and self.report.progress.reached < self.wanted_revision:
            self.own_state = _PAUSED  # as older output processors understand it
        columns.is_serving[row] = self.own_state == _SERVING
        return before != self.own_state

    def is_lost(self, now: float) -> bool:
        """Whether it has been silent for so long that its name is free."""
        return bool(now - self._columns.reported_at[self.row] > SILENT_SECONDS)

    def inherit(self, older: "EngineRecord") -> None:
        """Take over the picks of the same incarnation's earlier stream; :meth:`update` must follow."""
        self._counted, self._uncached = older._counted, older._uncached
        self._counted_tokens, self._counted_uncached = older._counted_tokens, older._counted_uncached
        self._queue = older._queue
        self.lost_picks = older.lost_picks

    def entry(self, now: float) -> EngineEntry:
        """Return the engine as snapshots show it."""
        entry = EngineEntry(
            identity=self.identity,
            report=self.shown,
            score=self.score,
            waiting=self.num_waiting,
            waiting_tokens=self.waiting_tokens,
        )
        entry.report.state = self.state
        entry.age.FromMilliseconds(round((now - float(self._columns.reported_at[self.row])) * 1000))
        return entry

    def _uncount(self, number: int) -> tuple[int, int]:
        """Forget a pick; return its prompt tokens, all and uncached."""
        prompt_tokens, uncached_tokens = self._counted.pop(number, 0), self._uncached.pop(number, 0)
        self._counted_tokens -= prompt_tokens
        self._counted_uncached -= uncached_tokens
        return prompt_tokens, uncached_tokens

    def _take(self, report: EngineReport, now: float) -> None:
        """Write a report's numbers to the columns."""
        self.report = report
        columns, row = self._columns, self.row
        columns.role[row] = report.role
        columns.running[row] = report.running
        columns.seats[row] = report.seats
        columns.prefill_rate[row] = report.prefill_tokens_per_second
        columns.computed_rate[row] = report.computed_tokens_per_second
        columns.step_seconds[row] = report.step_seconds
        columns.start_rate[row] = report.starts_per_second
        columns.reported_at[row] = now
        columns.num_reports += 1
        # Picks that the engine's report does not hold yet are added: until then their requests are invisible there.
        ahead = report.waiting_tokens + self._counted_tokens
        columns.waiting[row] = report.waiting + len(self._counted)
        columns.waiting_tokens[row] = ahead
        columns.uncached_tokens[row] = (
            report.prefilling_tokens + self._queue.uncached_tokens(report) + self._counted_uncached
        )
        columns.free_tokens[row] = report.free_kv_blocks * self.identity.fingerprint.block_size - ahead
        self.refresh(now)


_OF_ENGINE_ALONE = (
    *("computed_tokens_per_second", "prefilling_tokens", "start_wave", "wave_complete", "short_of_blocks"),
)


def _shown(report: EngineReport) -> EngineReport:
    """Return the report without what only the coordinator needs."""
    shown = EngineReport()
    shown.CopyFrom(report)
    for name in ("hello", "identity", "join", "progress", "picks_arrived", "step", *_OF_ENGINE_ALONE):
        shown.ClearField(name)
    return shown


class StallAwareClock:
    """Returns seconds that grow with those of ``read``, by at most ``longest`` between two ticks."""

    def __init__(self, read: Callable[[], float], longest: float = LONGEST_TICK_SECONDS) -> None:
        """``longest``: seconds."""
        self._read = read
        self._longest = longest
        self._base = self._ticked_at = read()

    def __call__(self) -> float:
        """Return the time, in seconds since no particular moment."""
        # A batch of 150 picks once kept the loop from reading reports for so long that every engine counted as dead.
        return self._base + min(self._read() - self._ticked_at, self._longest)

    def tick(self) -> float:
        """Count from now on, and return the time. To be called at least every ``longest`` seconds."""
        self._base, self._ticked_at = self(), self._read()
        return self._base

    async def run(self) -> NoReturn:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()


class ChangedEngines:
    """Keeps names of engines in the order of their changes: those whose load changed, by a report or a pick, and those
    that joined, left, or changed in something else, for example their state."""

    def __init__(self) -> None:
        self._loads: dict[str, None] = {}
        self._others: dict[str, None] = {}

    def load(self, name: str) -> None:
        """Note that an engine's load changed."""
        self._loads[name] = None

    def other(self, names: Iterable[str]) -> None:
        """Note that engines changed in more than their load."""
        self._others.update(dict.fromkeys(names))

    def take_others(self) -> Iterable[str]:
        """Return the engines that changed in more than their load, and forget them."""
        names, self._others = self._others, {}
        for name in names:
            self._loads.pop(name, None)
        return names

    def take_loads(self) -> Iterable[str]:
        """Return the engines of which only the load changed, and forget them; :meth:`take_others` must come first."""
        names, self._loads = self._loads, {}
        return names
