"""Finds prefixes and compares engines in C++ (``placement.cpp``), on the arrays of the Python that says how: the same
engine is chosen, in a few microseconds instead of tens. Python remains where there is no compiler."""

import ctypes
from ctypes import PyDLL, Structure, c_double, c_int64, c_void_p
from operator import is_
from typing import Final

import numpy as np

from tokenloom.gpu_worker.kernels.compiler import build
from tokenloom.request.prefix_schedule import LEADING_BLOCKS, MAX_HASHES
from tokenloom.services.runtime.placement import pairing, pool, rules
from tokenloom.services.runtime.placement.engine_columns import EngineColumns, IntColumn
from tokenloom.services.runtime.placement.pool import Candidates, Speeds
from tokenloom.services.runtime.placement.rules import Ask, Rule
from tokenloom.v1.types_pb2 import EngineRole

from .engines.engine_registry import Registry
from .prefixes.hash_table import Words
from .prefixes.prefix_index import IndexGeneration, Path, PrefixIndex, Run

_NO_ROW: Final = -1
_DECODE: Final = EngineRole.ENGINE_ROLE_DECODE


def load_library() -> PyDLL:
    """Return the library, built ahead, or once on this machine. Raises ``KernelsUnavailable``."""
    # PyDLL keeps the interpreter's lock: a call takes microseconds, and to get the lock back may take milliseconds.
    library = PyDLL(str(build("placement")))
    library.find_prefix.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    library.count_prefix.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    library.add_prefix.argtypes = [c_void_p, c_void_p, c_void_p, *(5 * [c_int64]), c_void_p]
    library.best_engine.argtypes = [c_void_p, c_void_p, c_void_p]
    for function in (library.find_prefix, library.count_prefix, library.add_prefix, library.best_engine):
        function.restype = c_int64
    return library


_OF_GROUPS: Final = ("runs", "begins", "sizes", "rooms", "num_blocks", "free_rooms", "state")


class _Groups(Structure):
    _fields_ = [*((name, c_void_p) for name in _OF_GROUPS), ("most_groups", c_int64), ("most_runs", c_int64)]


class _Generation(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("words", "values", "buckets", "used")),
        *((name, c_int64) for name in ("num_buckets", "num_blocks")),
        ("groups", _Groups),
    ]


class _Index(Structure):
    _fields_ = [
        ("young", _Generation),
        ("old", _Generation),
        *((name, c_void_p) for name in ("owner", "counts", "leading")),
        ("is_searchable", c_int64),
        ("num_rows", c_int64),
    ]


class NativeIndex:
    """Searches one index and adds to it."""

    def __init__(self, library: PyDLL) -> None:
        self._find, self._count, self._add = library.find_prefix, library.count_prefix, library.add_prefix
        self._seen = _Index()
        self._at = ctypes.addressof(self._seen)
        self._arrays: tuple[object, ...] = ()  # that have the addresses in what native code sees
        self._words, self._leading = np.zeros(MAX_HASHES, np.uint64), np.array(LEADING_BLOCKS, np.int64)
        self._runs, self._known = np.zeros((MAX_HASHES + 1, len(Run._fields)), np.int64), c_int64()
        self._counts, self._emptied = np.zeros(0, np.int64), np.zeros(MAX_HASHES + 1, np.int64)
        self._seen.leading = self._leading.ctypes.data
        self._addresses = self._words.ctypes.data, self._runs.ctypes.data, ctypes.addressof(self._known)
        self._at_emptied = self._emptied.ctypes.data
        self._path: Path | None = None  # the last one that was found, to which words and runs belong

    def lookup(self, index: PrefixIndex, words: Words, num_rows: int) -> tuple[Path, IntColumn | None]:
        """Return what :meth:`.PrefixIndex.lookup` returns."""
        self._look_at(index)
        if num_rows != self._seen.num_rows or not len(self._counts):
            # The last one is for what was forgotten: row -1.
            self._seen.num_rows, self._counts = num_rows, np.zeros(num_rows + 1, np.int64)
            self._at_counts, self._of_rows = self._counts.ctypes.data, self._counts[:-1]
        count, (at_words, at_runs, at_known) = len(words), self._addresses
        self._words[:count] = words
        num_runs = self._find(self._at, at_words, count, at_runs, at_known)
        path = self._path = Path(words, self._known.value, [Run(*run) for run in self._runs[:num_runs].tolist()])
        has_counts = self._count(self._at, at_runs, num_runs, self._at_counts)
        return path, self._of_rows if has_counts else None

    def add(self, index: PrefixIndex, path: Path, num_blocks: int, row: int, newest: int) -> None:
        """Do what :meth:`.PrefixIndex.add` does once it has room."""
        if path is not self._path:
            self._path = path
            self._words[: len(path.words)] = path.words
            self._runs[: len(path.runs)] = path.runs
        at_words, at_runs, _ = self._addresses
        num_runs, num_known = len(path.runs), path.num_known
        while True:
            self._look_at(index)
            asked = (num_runs, num_known, num_blocks, row, newest)
            num_emptied = self._add(self._at, at_words, at_runs, *asked, self._at_emptied)
            if num_emptied >= 0:
                break
            index.young.groups.double()
        if num_blocks > num_known:
            index.young.log.starts.num_entries += 1
            index.young.log.appended(num_blocks - num_known)
        for hash_run in self._emptied[:num_emptied].tolist() if num_emptied else ():
            index.hash_runs.leave(row, hash_run)

    def _look_at(self, index: PrefixIndex) -> None:
        """Take the addresses of what has grown or been replaced since."""
        seen, young, runs, arrays = self._seen, index.young, index.hash_runs, self._arrays
        seen.is_searchable = index.is_searchable
        seen.young.num_blocks = young.log.num_blocks
        groups, old_groups = young.groups, index.old.groups
        now = (young, groups.begins, groups.runs, old_groups.begins, old_groups.runs, runs.owner)
        if not arrays or not all(map(is_, arrays, now)):
            self._arrays = now
            _show(seen.young, young)
            _show(seen.old, index.old)
            seen.owner, seen.counts = runs.owner.ctypes.data, runs.counts.ctypes.data


def _show(seen: _Generation, generation: IndexGeneration) -> None:
    log, groups, table = generation.log, generation.groups, generation.log.starts
    for name, array in (("words", log.words), ("values", log.values), ("buckets", table.rows), ("used", table.used)):
        setattr(seen, name, array.ctypes.data)
    seen.num_buckets, seen.num_blocks = table.num_buckets, log.num_blocks
    for name in _OF_GROUPS:
        setattr(seen.groups, name, getattr(groups, name).ctypes.data)
    seen.groups.most_groups, seen.groups.most_runs = len(groups.begins), len(groups.runs)


_COLUMNS: Final = (
    *("waiting", "running", "free_tokens", "seats", "last_turn"),
    *("uncached_tokens", "session_share", "computed_rate", "step_seconds", "is_late"),
)


class _Engines(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*_COLUMNS, "rows")),
        *((name, c_int64) for name in ("first", "num_rows")),
        *((name, c_void_p) for name in ("seconds_per_request", "seconds_per_token")),
        ("mean_step_seconds", c_double),
    ]


class _Leg(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_by_cost", "is_decode", "prompt_tokens")),
        ("cached_tokens", c_void_p),
        *((name, c_int64) for name in ("home", "other_home", "has_session", "session_row", "session_tokens")),
        ("session_share", c_double),
    ]


_WEIGHTS: Final = (
    *(rules.WAITING_WEIGHT, rules.HOME_SHARE, rules.EXCESS, rules.EXCESS_STEPS, rules.SESSION_TOKENS),
    *(rules.MAX_SESSION_WEIGHT, rules.MAX_PRESSURE, rules.TIE, rules.BROUGHT_BACK, rules.RECOMPUTED),
    *(pool.BATCH_STEPS, pool.UNKNOWN_STEP_SECONDS, pool.UNKNOWN_RATE),
)


class _Seen:
    """Holds the addresses of the columns for some engines, as long as the columns do not grow."""

    def __init__(self, engines: EngineColumns, some: Candidates) -> None:
        self.waiting = engines.waiting
        first = some.index.start if isinstance(some.index, slice) else _NO_ROW
        self.engines = _Engines(num_rows=len(some), first=first, rows=some.rows.ctypes.data)
        self.at = ctypes.addressof(self.engines)
        self.speeds: Speeds | None = None
        for name in _COLUMNS:
            setattr(self.engines, name, getattr(engines, name).ctypes.data)

    def take(self, speeds: Speeds) -> None:
        """Take what the rule ``cost`` needs."""
        self.speeds, engines = speeds, self.engines
        engines.mean_step_seconds = speeds.step_seconds
        engines.seconds_per_request = speeds.seconds_per_request.ctypes.data
        engines.seconds_per_token = speeds.seconds_per_token.ctypes.data


class NativeComparison:
    """Finds the best engine by a rule that is built in."""

    def __init__(self, library: PyDLL) -> None:
        self._best = library.best_engine
        self._cached: IntColumn | None = None
        self._leg, self._weights = _Leg(), (c_double * len(_WEIGHTS))(*_WEIGHTS)
        self._at = ctypes.addressof(self._leg), ctypes.addressof(self._weights)

    def best(self, engines: EngineColumns, some: Candidates, ask: Ask, rule: Rule) -> int:
        """Return what ``pairing.best`` returns."""
        is_by_cost = rule is rules.cost
        if len(some) == 1 or not (is_by_cost or rule is rules.score):
            return pairing.best(engines, some, ask, rule)
        seen = some.native
        if not isinstance(seen, _Seen) or seen.waiting is not engines.waiting:
            seen = some.native = _Seen(engines, some)
        if is_by_cost and (speeds := some.speeds(engines)) is not seen.speeds:
            seen.take(speeds)
        leg, (at_leg, at_weights) = self._leg, self._at
        leg.is_by_cost, leg.is_decode, leg.prompt_tokens = is_by_cost, ask.role == _DECODE, ask.prompt_tokens
        if (cached := ask.cached_tokens) is not self._cached:
            self._cached = cached  # mostly the array of the index, which stays where it is
            leg.cached_tokens = None if cached is None else cached.ctypes.data
        leg.home, leg.other_home = (*ask.homes, _NO_ROW, _NO_ROW)[:2]
        leg.has_session = ask.session is not None
        if ask.session is not None:
            row, leg.session_tokens, leg.session_share = ask.session
            leg.session_row = _NO_ROW if row is None else row
        else:
            leg.session_row = _NO_ROW
        return int(self._best(seen.at, at_leg, at_weights))


def use_natively(registry: Registry, library: PyDLL) -> None:
    """Let a registry search and compare natively from now on; what it knows remains."""
    registry.prefixes.native = NativeIndex(library)
    registry.placing.best = NativeComparison(library).best
