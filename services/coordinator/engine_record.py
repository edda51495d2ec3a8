"""What the coordinator knows of one engine: its last report, and picks not yet acknowledged. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState

from .prefix_index import PrefixIndex

WAITING_WEIGHT = 4
"""A waiting request weighs four running ones: it will cost a prefill, and it says that there was no room."""
PICK_SECONDS = 2.0
"""How long a pick counts that the engine never acknowledges: its output processor died or placed elsewhere."""
SILENT_SECONDS = 3.0
"""An engine reports at least every second; after so long it is not well."""
STANDSTILL_SECONDS = 60.0
"""How long a step may take, by far: a loop that stands still for longer with work to do hangs."""

_DEAD = EngineState.ENGINE_STATE_DEAD
_PAUSED = EngineState.ENGINE_STATE_PAUSED
_SERVING = EngineState.ENGINE_STATE_SERVING


@dataclass(frozen=True, slots=True)
class CountedPick:
    """A pick on its way to the engine."""

    prompt_tokens: int
    expires_at: float


class EngineRecord:
    """One incarnation of an engine. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, identity: EngineIdentity, report: EngineReport, now: float) -> None:
        self.identity = identity
        self.report = report
        self.last_turn = 0
        """Number of the last pick that chose it: of equals, the one longest not chosen is next."""
        self._reported_at = now
        self._progressed_at = now
        # In order of expiry. As many as are picked within PICK_SECONDS.
        self._counted: dict[int, CountedPick] = {}
        self._prefixes = PrefixIndex(identity.num_kv_blocks)

    @property
    def score(self) -> int:
        """Lowest is next: waiting * 4 + running, counted picks being waiting."""
        return (self.report.waiting + len(self._counted)) * WAITING_WEIGHT + self.report.running

    @property
    def num_waiting(self) -> int:
        return self.report.waiting + len(self._counted)

    def update(self, report: EngineReport, coordinator_epoch: int, now: float) -> bool:
        """Takes a report. False when nothing of interest changed: only the loop's step."""
        previous, self.report = self.report, report
        if report.step != previous.step or report.running + report.waiting == 0 or previous.state == _PAUSED:
            self._progressed_at = now
        self._reported_at = now
        before = len(self._counted)
        for pick in report.picks_arrived:
            if pick.coordinator_epoch == coordinator_epoch:  # else of a coordinator before this one
                self._counted.pop(pick.number, None)
        return len(self._counted) != before or _shown(previous) != _shown(report)

    def count(self, number: int, prompt_tokens: int, now: float, prefix_hashes: Sequence[int] = ()) -> None:
        """A leg was placed here: it counts until a report names exactly this pick, or its time is up. The KV of its
        prompt will be here."""
        self._counted[number] = CountedPick(prompt_tokens, now + PICK_SECONDS)
        self.last_turn = number
        self._prefixes.add(prefix_hashes)

    def cached_tokens(self, prefix_hashes: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that recent picks have left in the KV cache."""
        return self._prefixes.match(prefix_hashes) * self.identity.fingerprint.block_size

    def expire(self, now: float) -> bool:
        """Forgets picks that never arrived. True when there were any."""
        late = [number for number, pick in self._counted.items() if pick.expires_at <= now]
        for number in late:
            del self._counted[number]
        return bool(late)

    def inherit(self, older: "EngineRecord") -> None:
        """Takes over the picks of the same incarnation's earlier stream."""
        if older.identity.epoch == self.identity.epoch:
            self._counted |= older._counted
            self._prefixes = older._prefixes
            self.last_turn = older.last_turn

    def state(self, now: float) -> EngineState:
        """What it says of itself, unless it fell silent or its loop stands still with work to do."""
        if now - self._reported_at > SILENT_SECONDS:
            return _DEAD
        stands_still = now - self._progressed_at > STANDSTILL_SECONDS
        return _DEAD if stands_still and self.report.state != _PAUSED else self.report.state

    def is_serving(self, now: float) -> bool:
        return bool(self.state(now) == _SERVING)

    def can_hold(self, prompt_tokens: int) -> bool:
        """Whether the KV cache, were it empty, holds the prompt and a first token."""
        size = self.identity.num_kv_blocks * self.identity.fingerprint.block_size
        return prompt_tokens + 1 <= min(size, self.identity.limits.max_model_len or size)

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether the blocks that are free now hold the prompt, after all prompts that are ahead of it."""
        free = self.report.free_kv_blocks * self.identity.fingerprint.block_size
        ahead = self.report.waiting_tokens + sum(pick.prompt_tokens for pick in self._counted.values())
        return ahead + prompt_tokens + 1 <= free

    def entry(self, now: float) -> EngineEntry:
        """As snapshots show it."""
        entry = EngineEntry(identity=self.identity, report=_shown(self.report), score=self.score)
        entry.report.state = self.state(now)
        entry.age.FromMilliseconds(round((now - self._reported_at) * 1000))
        return entry


def _shown(report: EngineReport) -> EngineReport:
    """The report without what only the coordinator needs."""
    shown = EngineReport()
    shown.CopyFrom(report)
    for name in ("hello", "identity", "picks_arrived", "step"):
        shown.ClearField(name)
    return shown
