"""Notes engines that report, but are of little use: none can exchange KV with them, picks do not arrive at them, or
their machine's memory is faulty. :mod:`.engine_record` decides which engines are dead. No I/O."""

from collections.abc import Iterable, Mapping

from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.runtime.peers.hello import engine_difference
from tokenloom.services.runtime.placement.fingerprint_kinds import PAIR_FIELDS, POOL_FIELDS
from tokenloom.services.runtime.placement.pairing import missing_role
from tokenloom.v1.coordinator_pb2 import EngineReport, EngineState
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .engine_record import EngineRecord

LOST_PICKS = 3
"""So many picks in a row that never arrived at an engine mean that it is not reached; one or two are those of an output
processor that died, or of requests that were cancelled."""
DAMAGED, WRONG = "damaged_weights", "wrong_tokens"
ENDINGS = DAMAGED, WRONG
"""Why engines end whose memory is not to be trusted."""
DAMAGED_SECONDS = 3600.0
"""How long that is shown. The engine itself ends at once, and the next one of its name knows nothing."""
_SERVING = EngineState.ENGINE_STATE_SERVING
_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
_PARTNERS = {_PREFILL: (_DECODE, _BOTH), _DECODE: (_PREFILL, _BOTH)}
_Sort = tuple[bytes, int]
"""Fingerprint and role: a thousand engines have a few."""


class EngineSigns:
    """Keeps the fall-backs that only the coordinator can see, whose subjects are engines.

    Attributes:
        num_ended: How often an engine has ended for each of :data:`ENDINGS`.
    """

    def __init__(self, fall_backs: FallBacks) -> None:
        self.num_ended = dict.fromkeys(ENDINGS, 0)
        self._fall_backs = fall_backs
        self._ended: dict[tuple[str, str], float] = {}  # until when it is shown: kind, engine; those of the last hour

    def reported(self, name: str, before: EngineReport, report: EngineReport, now: float) -> None:
        """Note what an engine reports that it does without, and had not reported ``before``."""
        for each in report.fall_backs:
            if each.kind in ENDINGS and all(known.kind != each.kind for known in before.fall_backs):
                self.num_ended[each.kind] += 1
                self._ended[each.kind, name] = now + DAMAGED_SECONDS
                self._put(each.kind, name, each.detail)

    def forget(self, name: str) -> None:
        """Forget an engine that has left, or whose name another one has, but not why it was not to be trusted."""
        self._fall_backs.forget(name, but=ENDINGS)

    def refresh(self, now: float) -> list[str]:
        """Forget what was shown for long enough. Returns the names of those of which something else is known."""
        ended = [each for each, until in self._ended.items() if until <= now] if self._ended else []
        for kind, name in ended:
            del self._ended[kind, name]
            self._fall_backs.end(kind, name)
        return [name for _, name in ended]

    def look(self, records: Iterable[EngineRecord]) -> list[str]:
        """Look for engines without partners. To be called when engines joined, left or changed their state or role.
        Returns the names of those of which something else is known than before."""
        serving = [record for record in records if record.state == _SERVING]
        sorts: dict[_Sort, EngineRecord] = {}
        for record in serving:
            sorts.setdefault(_sort(record), record)
        reasons = {sort: _without_partner(record, sorts) for sort, record in sorts.items()}
        if missing_role(role for _, role in sorts) is None:
            self._fall_backs.end("missing_role")
        # The common case ends here: a thousand engines have a few fingerprints, and looking at each would delay picks.
        if not any(reasons.values()) and not any(each.kind == "no_pair" for each in self._fall_backs.active):
            return []
        changed = []
        for record in serving:
            name, reason = record.identity.engine_id, reasons[_sort(record)]
            if reason != self._fall_backs.of(name).get("no_pair", ""):
                self._put("no_pair", name, reason)
                changed.append(name)
        return changed

    def lost(self, record: EngineRecord) -> bool:
        """Note that a pick never arrived at an engine. Returns whether it is out of reach from now on."""
        name = record.identity.engine_id
        if record.lost_picks < LOST_PICKS or "unreached" in self._fall_backs.of(name):
            return False
        self._put("unreached", name, f"{LOST_PICKS} requests in a row did not arrive at {record.identity.address}")
        return True

    def arrived(self, record: EngineRecord) -> bool:
        """Note that picks arrived at an engine. Returns whether it was out of reach."""
        name = record.identity.engine_id
        was_unreached = "unreached" in self._fall_backs.of(name)
        self._fall_backs.end("unreached", name)
        return was_unreached

    def _put(self, kind: str, name: str, reason: str) -> None:
        if reason:
            self._fall_backs.begin(kind, reason, name)
        else:
            self._fall_backs.end(kind, name)


def _sort(record: EngineRecord) -> _Sort:
    return record.fingerprint_bytes, record.report.role


def _without_partner(record: EngineRecord, sorts: Mapping[_Sort, EngineRecord]) -> str:
    """Return why an engine hands over to none, or takes from none; empty if it does, or is not meant to."""
    ours, role = record.identity.fingerprint, record.report.role
    partners = [
        other.identity.fingerprint
        for (_, other_role), other in sorts.items()
        if other_role in _PARTNERS.get(role, ()) and _is_equal(ours, other.identity.fingerprint, POOL_FIELDS)
    ]
    if not partners or any(_is_equal(ours, theirs, PAIR_FIELDS) for theirs in partners):
        return ""
    layouts = ", ".join(sorted({theirs.kv_layout for theirs in partners}))
    return f"its KV layout is {ours.kv_layout}, that of the engines of the other role is {layouts}"


def _is_equal(ours: Fingerprint, theirs: Fingerprint, fields: tuple[str, ...]) -> bool:
    return engine_difference(ours, theirs, fields) is None
