"""Keeps what the coordinator knows of one engine: its last report, picks on their way, cached prefixes. No I/O."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState

WAITING_WEIGHT = 4
"""A waiting request weighs four running ones: it will cost a prefill, and it shows that there was no room."""
PICK_SECONDS = 2.0
"""How long a pick counts that the engine never acknowledges: its output processor died or placed elsewhere."""
LATE_SECONDS = 3.0
"""An engine reports at least every second; one that is silent for so long gets requests only if no other engine can
take them: its event loop is busy."""
SILENT_SECONDS = 10.0
"""An engine that is silent for so long counts as dead. The stream of one that was stopped or cut off ends earlier."""
STANDSTILL_SECONDS = 60.0
"""Far longer than any step: an engine with work to do whose step does not change for so long hangs."""
MAX_HASHES = 256
"""Block hashes considered of one prompt; more do not change a placement."""
MAX_BLOCKS = 1 << 16
"""Block hashes remembered of one engine: the least recently picked are forgotten first, as in the engine's cache."""

_DEAD = EngineState.ENGINE_STATE_DEAD
_PAUSED = EngineState.ENGINE_STATE_PAUSED
_SERVING = EngineState.ENGINE_STATE_SERVING


class PrefixIndex:
    """Remembers which prefixes an engine probably has in its KV cache: those of its recent picks.

    Keeps hashes of blocks, least recently used first. Hashes are chained: a block's stands for all of its prefix.
    """

    def __init__(self, num_kv_blocks: int) -> None:
        """``num_kv_blocks``: blocks of the engine's cache; no more are remembered."""
        self._max_blocks = min(num_kv_blocks, MAX_BLOCKS)
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt are remembered."""
        count = 0
        for block_hash in hashes[:MAX_HASHES]:
            if block_hash not in self._hashes:
                break
            count += 1
        return count

    def add(self, hashes: Sequence[int]) -> None:
        """Remember a prompt that was placed. Its last block is forgotten first: it is of no use without the others."""
        for block_hash in reversed(hashes[:MAX_HASHES]):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)


@dataclass(frozen=True, slots=True)
class CountedPick:
    """Describes a pick on its way to the engine."""

    prompt_tokens: int
    expires_at: float


class EngineRecord:
    """Describes one incarnation of an engine. Times are seconds of one monotonic clock, given by the caller.

    Attributes:
        report: The last one.
        prefixes: What its KV cache probably holds.
        last_turn: Number of the last pick that chose it: of equal engines, the one longest not chosen is next.
        num_waiting: Requests that wait there, counted picks included.
        waiting_tokens: Their prompt tokens that are not computed yet.
        score: waiting * 4 + running; the engine with the lowest score is next.
        free_tokens: Tokens that its free KV blocks hold once all waiting prompts are computed; may be negative.
        max_tokens: Tokens of one request that its KV cache holds at most, were it empty.
        is_late: Whether its last report is older than it should be.
        state: What it reports, unless it fell silent or hangs.
        adapters: Digests of the LoRA adapters that it has loaded.
    """

    def __init__(self, identity: EngineIdentity, report: EngineReport, now: float) -> None:
        self.identity = identity
        self.report = report
        self.prefixes = PrefixIndex(identity.num_kv_blocks)
        self.last_turn = 0
        self.adapters: frozenset[bytes] = frozenset()
        size = identity.num_kv_blocks * identity.fingerprint.block_size
        limit = identity.limits.max_model_len
        self.max_tokens = min(size, limit or size) if size else limit  # encoders keep no KV
        self._shown = EngineReport()
        self._reported_at = self._progressed_at = now
        # In order of expiry. As many as are picked within PICK_SECONDS.
        self._counted: dict[int, CountedPick] = {}
        self._recount(now)

    @property
    def is_serving(self) -> bool:
        return self.state == _SERVING

    @property
    def can_load_adapters(self) -> bool:
        return self.identity.limits.max_lora_rank > 0

    def update(self, report: EngineReport, coordinator_epoch: int, now: float) -> bool:
        """Take a report. Returns False when nothing of interest changed: only the number of the step."""
        previous, self.report = self.report, report
        if report.step != previous.step or report.running + report.waiting == 0 or previous.state == _PAUSED:
            self._progressed_at = now
        self._reported_at = now
        if report.adapters or self.adapters:
            self.adapters = frozenset(adapter.digest for adapter in report.adapters)
        before, shown = (self._shown, self.score), _shown(report)
        self._shown = shown
        for pick in report.picks_arrived:
            if pick.coordinator_epoch == coordinator_epoch:  # otherwise a former coordinator's
                self._counted.pop(pick.number, None)
        self._recount(now)
        return before != (shown, self.score)

    def count(self, number: int, prompt_tokens: int, now: float, prefix_hashes: Sequence[int] = ()) -> None:
        """Count a leg that was placed here until a report names exactly this pick or its time is up, and remember that
        the engine will have the KV of its prompt."""
        self._counted[number] = CountedPick(prompt_tokens, now + PICK_SECONDS)
        self.last_turn = number
        self.num_waiting += 1
        self.score += WAITING_WEIGHT
        self.free_tokens -= prompt_tokens
        self.waiting_tokens += prompt_tokens
        if prefix_hashes:
            self.prefixes.add(prefix_hashes)

    def refresh(self, now: float) -> bool:
        """Forget picks that never arrived, and notice silence and standstill. Returns whether anything changed."""
        before = self.score, self.state
        for number in [number for number, pick in self._counted.items() if pick.expires_at <= now]:
            del self._counted[number]
        self._recount(now)
        return before != (self.score, self.state)

    def inherit(self, older: "EngineRecord") -> None:
        """Take over the picks of the same incarnation's earlier stream; :meth:`update` must follow."""
        if older.identity.epoch == self.identity.epoch:
            self._counted |= older._counted
            self.prefixes = older.prefixes
            self.last_turn = older.last_turn

    def entry(self, now: float) -> EngineEntry:
        """Return the engine as snapshots show it."""
        entry = EngineEntry(
            identity=self.identity,
            report=self._shown,
            score=self.score,
            waiting=self.num_waiting,
            waiting_tokens=self.waiting_tokens,
        )
        entry.report.state = self.state
        entry.age.FromMilliseconds(round((now - self._reported_at) * 1000))
        return entry

    def _recount(self, now: float) -> None:
        report = self.report
        self.num_waiting = report.waiting + len(self._counted)
        self.score = self.num_waiting * WAITING_WEIGHT + report.running
        ahead = report.waiting_tokens
        for pick in self._counted.values():
            ahead += pick.prompt_tokens
        self.waiting_tokens = ahead
        self.free_tokens = report.free_kv_blocks * self.identity.fingerprint.block_size - ahead
        hangs = now - self._progressed_at > STANDSTILL_SECONDS and report.state != _PAUSED
        silence = now - self._reported_at
        self.is_late = silence > LATE_SECONDS
        self.state = _DEAD if hangs or silence > SILENT_SECONDS else report.state


def _shown(report: EngineReport) -> EngineReport:
    """Return the report without what only the coordinator needs."""
    shown = EngineReport()
    shown.CopyFrom(report)
    for name in ("hello", "identity", "picks_arrived", "step"):
        shown.ClearField(name)
    return shown
