"""The fall-backs of all parts in one table: each keeps a mesh answering with less than was asked for.

A part keeps those that are in effect in a :class:`FallBacks`, which logs one warning when a fall-back begins and counts
it. Metrics, ``tokenloom ps`` and ``/health`` show it until it ends. Cores and workers report theirs in
:data:`OF_PROCESS` to their engine.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

KINDS: Final[Mapping[str, str]] = {
    # Seen by the coordinator; the subject is an engine.
    "other_weights": "An engine or encoder has other weights than those that serve its name: it gets no requests.",
    "other_numerics": "A request continued on an engine that computes in another way: its last bits may differ.",
    "no_pair": "No serving engine of the other role can read or send this engine's KV blocks: nothing is handed over.",
    "missing_role": "No engine of a role serves: every request stays on one engine.",
    "unreached": "No request that was placed on an engine has arrived there: output processors cannot reach it.",
    "failed_plugin": "A placement rule or a scheduler of a plugin fails: what is built in decides in its place.",
    "unfollowed_cache": "The events of an engine's prefix cache are of no use: only the coordinator's picks are known.",
    # Seen by output processors.
    "unrecorded": "Requests that end are not recorded: the folder of --request-record-dir takes too few or none.",
    "last_snapshot": "The coordinator does not answer: requests are placed by its last snapshot.",
    "unverified": "Requests are not computed again (--verify): no other engine that computes alike has time for them.",
    "unsettled_tokens": "Engines compute other tokens for one request, and it is not known which is wrong: all serve.",
    # Seen by output processors and gateways.
    "wrong_peer": "A part sent invalid messages: it gets no requests that another one can run.",
    # Seen by gateways.
    "single_journal": "Requests have no copy at a second output processor, which --journal-copies asks for.",
    "old_view": "The coordinator does not answer: engines and limits are those of its last snapshot.",
    "other_tokenizer": "A tokenizer serves something else than the first one: it gets no calls.",
    "few_connections": "The limit of open files leaves fewer connections of clients than --max-connections.",
    # Seen by every part.
    "low_open_files": "The system refuses to raise the soft limit of open files to the hard one.",
    "old_certificate": "A new certificate cannot be used: the previous one stays in use.",
    # Seen by encoders.
    "unconfined": "Images and sounds are decoded in processes that may use the network and other programs.",
    # Seen by engines of their coordinator.
    "refused": "The coordinator refuses an engine, for example because another one has its name: it gets no requests.",
    "not_in_state": "An engine has not reached the state that operators want: it gets no requests and tries again.",
    # Seen by engines when they end, and kept by the coordinator for an hour.
    "damaged_weights": "An engine's weights changed in memory by themselves: it ended, and the next reads them anew.",
    "wrong_tokens": "An engine computed other tokens than others (--verify): it ended, and the next one begins anew.",
    # Seen by engines, and reported by their cores and workers.
    "no_reasoning": "The tokenizer cannot write the marks of reasoning: it is not distinguished from answers.",
    "kv_recomputed": "KV blocks of another engine could not be read: the prompt was computed here.",
    "kv_transport": "A transport of KV blocks does not work on this machine: others are used, or none.",
    "slow_kernels": "Kernels are not available or not those built ahead: slower operations replace them.",
    "slow_modules": "The modules of transformers compute the model, which takes more time.",
    "no_graph": "A GPU did not capture steps of some sizes: their operations are called one by one, which is slower.",
    "less_precision": "The checkpoint's dtype has no kernels here: it is served with less precision.",
    "unquantized": "Layers of shapes that --quantization cannot take keep their dtype: they take more memory and time.",
    "short_prompts": "Prompts are limited to less than the model's context.",
    "no_shared_memory": "There is no shared memory: arrays go over sockets, or a step that hangs is noticed late.",
    "unpinned_memory": "KV is copied through memory that is not pinned, or not between GPUs directly, at less speed.",
    "no_constraints": "Outputs cannot be constrained: the model's tokenizer cannot be saved.",
    "offload_file": "The offload file cannot be written or read, or changes bytes: its blocks are computed again.",
    "kv_store": "The store of KV blocks does not answer or changes bytes: prompts are computed, and it is tried again.",
}
"""What each fall-back means, by its name, which metrics and messages carry."""


_MOST_REASONS: Final = 500
"""In characters."""
_NONE: Final[Mapping[str, str]] = {}


class FallBack(NamedTuple):
    """A fall-back that is in effect.

    Attributes:
        kind: One of :data:`KINDS`.
        subject: What it concerns, for example an engine; empty: the part itself.
        detail: What was found, for operators.
    """

    kind: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.subject, self.kind, self.detail) if part)


class FallBacks:
    """Keeps the fall-backs of one part, from any thread. Their number is bounded by kinds and subjects, which are parts
    of the mesh.

    Attributes:
        on_change: Called after a fall-back began or ended, in the thread in which it did; None: nothing is.
    """

    def __init__(self, on_change: Callable[[], None] | None = None, beside: "FallBacks | None" = None) -> None:
        """``beside``: fall-backs that are shown with these, and have none beside them; None: there are none."""
        self.on_change = on_change
        self._beside = beside
        self._counts: Counter[str] = Counter()
        self._active: dict[str, dict[str, str]] = {}  # details by subject and kind
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """How often each kind has begun."""
        with self._lock:
            found = self._counts.copy()
        return found + (self._beside.counts if self._beside else Counter())

    @property
    def active(self) -> list[FallBack]:
        """Those that are in effect."""
        found = self._beside.active if self._beside and self._beside._active else []
        if self._active:
            with self._lock:
                found += [
                    FallBack(kind, subject, detail)
                    for subject, details in self._active.items()
                    for kind, detail in details.items()
                ]
        return found

    def own(self) -> list[tuple[str, str]]:
        """Return kinds and details of what concerns the part itself, as messages of a core carry them."""
        return list(self.of("").items())

    def of(self, subject: str) -> Mapping[str, str]:
        """Return the details of what is in effect for a subject, by kind."""
        return self._active.get(subject, _NONE)

    def begin(self, kind: str, detail: str, subject: str = "") -> None:
        """Note that a fall-back is in effect. Logs a warning unless it was already. Raises ``KeyError`` for a kind that
        the table lacks."""
        meaning = KINDS[kind]
        with self._lock:
            details = self._active.setdefault(subject, {})
            if details.get(kind) == detail:
                return
            is_new = kind not in details
            details[kind] = detail
            self._counts[kind] += is_new
        if is_new:
            log.warning("fall-back %s: %s (%s)", f"{kind} of {subject}" if subject else kind, meaning, detail)
        self._changed()

    def add(self, kind: str, reason: str) -> None:
        """Note a further reason for a fall-back of the part itself, and log each once. A fall-back keeps so many as can
        be shown."""
        known = self.of("").get(kind, "")
        if reason in known or len(known) >= _MOST_REASONS:
            return
        self.begin(kind, f"{known}; {reason}" if known else reason)
        if known:
            log.warning("fall-back %s has another reason: %s", kind, reason)

    def end(self, kind: str, subject: str = "") -> None:
        """Note that a fall-back is in effect no more. Without one it has no effect."""
        if kind not in self._active.get(subject, _NONE):
            return
        with self._lock:
            details = self._active.get(subject, {})
            details.pop(kind, None)
            if not details:
                self._active.pop(subject, None)
        log.info("fall-back %s has ended", f"{kind} of {subject}" if subject else kind)
        self._changed()

    def forget(self, subject: str, *, but: Container[str] = ()) -> None:
        """End all of a subject, which is gone. ``but``: kinds that stay."""
        for kind in list(self.of(subject)):
            if kind not in but:
                self.end(kind, subject)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


OF_PROCESS: Final = FallBacks()
"""Those of a core or worker, a process that is no part of the mesh by itself."""
