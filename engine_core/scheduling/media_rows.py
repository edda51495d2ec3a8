"""Knows which rows of images the engine has, asks for those that steps will need, and keeps the requests that wait for
them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ..data.config import SchedulerConfig
from ..data.embedding_rows import EmbedsSpan, MediaSpan, RowsKey
from ..data.messages import ArrivedRows, RowsWanted, SchedulerStats
from ..data.model_info import ModelInfo
from ..data.request import Request, RequestKV, RequestStatus

_NUMBER_BYTES: Final = 4


@dataclass(slots=True, eq=False)
class _Entry:
    """The rows of one image: those that are here, or that were asked for."""

    num_bytes: int
    number: int
    """Of the asking; one that follows another has a higher one."""
    rows: npt.NDArray[np.float32] | None = None
    """All of them."""
    parts: npt.NDArray[np.float32] | None = None
    """Memory for all of them, while only some are here."""
    num_received: int = 0
    """Rows that are here, from the first one on."""
    holders: dict[str, None] = field(default_factory=dict)
    """The requests that need them, by id, in the order in which they asked."""


@dataclass(slots=True, eq=False)
class _Holding:
    """The rows that one request has, or has asked for."""

    request: Request
    start: int
    """The first token that it may have to compute, when it asked last."""
    keys: list[RowsKey] = field(default_factory=list)
    """In the order of the prompt, from the first row that it needs on, without a gap."""
    is_short: bool = False
    """Whether it needs more than these."""


def _needs(kv: RequestKV, span: MediaSpan, start: int) -> bool:
    """Return whether a step needs rows of a span that computes tokens of a request from ``start`` on."""
    return span.end > start or (span.is_beside and kv.lacks_cross)


# Rows are asked for once the hits in the prefix cache are known, so a second turn over the same image asks for none.
# They are freed when they are computed: their KV stays, and the encoder keeps them for the next prompt.
class RowStore:
    """Bounds the rows of images in bytes, and owns the requests in ``WAITING_FOR_ROWS``, which are in no queue.

    A request holds the rows of its next images as far as they fit, always from the first one on that it needs, so that
    what it holds lets it compute. A request that runs and lacks its next row takes the room of those that wait.
    """

    def __init__(
        self, capacity: int, hidden_size: int, levels: int = 1, cross_rows: int = 0, *, in_chunks: bool = True
    ) -> None:
        """``capacity``: bytes of rows, as float32, that are here or on their way. ``hidden_size``: numbers of a row of
        one level. ``levels``: those of the model. ``cross_rows``: as in ``MediaTraits``. ``in_chunks``: whether the
        prefill of a prompt may take several steps."""
        self.capacity = capacity
        self.cross_rows = cross_rows
        self._levels = levels
        self.parked: dict[str, Request] = {}
        """The requests that wait for rows; only the methods change it."""
        self.num_bytes = 0
        """Bytes of the rows that are here or on their way."""
        self._row_bytes = _NUMBER_BYTES * hidden_size
        self._in_chunks = in_chunks
        self._entries: dict[RowsKey, _Entry] = {}
        self._holdings: dict[str, _Holding] = {}  # of live requests with images
        self.wanted: list[RowsWanted] = []
        """What was asked for since :meth:`take_wanted`: bounded by the rows that may be on their way, and their
        holders."""
        self.may_get_more = False
        """Whether room was freed, or a request began to wait, since :meth:`share_out`."""
        self.num_asked = 0
        """Images that were asked for."""
        self._num_received = self._bytes_received = self._parked_tokens = 0

    @classmethod
    def of_model(cls, config: SchedulerConfig, model: ModelInfo) -> "RowStore | None":
        """Return what keeps the rows for this model; None if it reads text only. Raises ``ValueError`` if the sound
        that stands beside each prompt of the model has no room."""
        if model.media is None:
            return None
        media, capacity, in_chunks = model.media, config.rows_cache_bytes, config.enable_chunked_prefill
        if capacity < (size := media.cross_rows * model.hidden_size * _NUMBER_BYTES):
            raise ValueError(
                f"rows_cache_bytes is {capacity}; the rows of one sound take {size} bytes, and each prompt has one"
            )
        return cls(capacity, model.hidden_size, media.levels, media.cross_rows, in_chunks=in_chunks)

    def refusal(self, request: Request, max_tokens: int) -> str:
        """Return why the images of a request can never be computed; empty if they can. ``max_tokens``: of a step."""
        if error := self._misplaced(request):
            return error
        sizes: dict[RowsKey, int] = {}
        for span in request.kv.media:
            if span.levels != self._levels:
                return f"an image or sound has rows of {span.levels} levels; this model reads {self._levels}"
            size = sizes[span.rows_key] = self._size(span.rows_key)
            if size > self.capacity:
                return (
                    f"an image or sound has {span.num_rows} rows, which take {size} bytes; "
                    f"the engine has room for {self.capacity} (--rows-cache-bytes)"
                )
            if span.is_whole and span.num_tokens > max_tokens:
                return (
                    f"an image has {span.num_tokens} tokens that one step must compute; "
                    f"a step computes {max_tokens} (--max-num-batched-tokens)"
                )
        if not self._in_chunks and sum(sizes.values()) > self.capacity:
            return (
                f"the rows of the prompt take {sum(sizes.values())} bytes; the engine has room for {self.capacity} "
                "(--rows-cache-bytes), and without chunked prefill it needs all at once"
            )
        return ""

    def _misplaced(self, request: Request) -> str:
        """Return what is wrong with where the rows of a request stand; empty: nothing is."""
        media = request.kv.media
        if not self.cross_rows:
            return "this model reads rows in the prompt, and none beside it" if media[0].is_beside else ""
        if len(media) != 1 or not media[0].is_beside:
            return "this model writes down sound: the prompt needs exactly one, beside its tokens"
        if media[0].num_rows != self.cross_rows:
            return f"the sound has {media[0].num_rows} rows; this model reads {self.cross_rows}"
        return ""

    def may_begin(self, request: Request, start: int) -> bool:
        """Ask for the rows that a request needs from token ``start`` on. Returns whether it may begin: those that it
        could ask for are here, and its first ones are among them."""
        holding = self._hold(request, start)
        return holding is None or self._is_ready(holding)

    def park(self, request: Request) -> None:
        """Let a request wait for its rows. It is in no queue, and holds no blocks."""
        request.resume_status = request.status
        request.set_status(RequestStatus.WAITING_FOR_ROWS)
        self.parked[request.request_id] = request
        self._parked_tokens += request.num_tokens
        self.may_get_more = True

    def arrived(self, message: ArrivedRows) -> list[Request]:
        """Take rows that were asked for; others are ignored. Returns the requests that need not wait any more, with the
        status that they had before. Raises ``ValueError`` for rows of another width, too many or out of order."""
        entry = self._entries.get(message.key)
        if entry is None or entry.number != message.number or entry.rows is not None:
            return []
        rows, end = message.rows, message.first_row + len(message.rows)
        shape = (message.key.num_rows, message.key.levels * self._row_bytes // _NUMBER_BYTES)
        if message.first_row > entry.num_received or end > shape[0] or rows.shape[1:] != shape[1:]:
            raise ValueError(
                f"rows {message.first_row} on of shape {rows.shape}; {entry.num_received} of {shape} are here"
            )
        if end <= entry.num_received:  # a client that lost count begins again
            return []
        entry.num_received = end
        self._bytes_received += rows.nbytes
        if len(rows) < shape[0]:
            if entry.parts is None:
                entry.parts = np.empty(shape, np.float32)
            entry.parts[message.first_row : end] = rows
            rows = entry.parts
        if end < shape[0]:
            return []
        entry.rows, entry.parts = rows, None
        self._num_received += 1
        return self._take_ready(list(entry.holders))

    def share_out(self) -> list[Request]:
        """Let requests ask for further rows, as far as there is room: those that run first, then those that wait, the
        one that has waited longest first. Returns those that need not wait any more, as :meth:`arrived` does."""
        self.may_get_more = False
        short = [holding for holding in self._holdings.values() if holding.is_short]
        for holding in short:
            if holding.request.status is RequestStatus.RUNNING:
                self._extend_running(holding)
        waiting = [request_id for request_id in self.parked if not self._holdings[request_id].keys]
        resumed = []
        for request_id in waiting:
            holding = self._holdings[request_id]
            self._hold(holding.request, holding.start)
            if not holding.keys:
                break  # those behind it do not take its room
            resumed += self._take_ready([request_id])
        return resumed

    def chunk_end(self, kv: RequestKV, start: int, end: int, most: int) -> int:
        """Return where a chunk ends that would compute the tokens ``start`` to ``end``: before the first token whose
        row is missing, and not among tokens that see each other. If it begins among these, it ends behind them, though
        that may be beyond ``end``, unless that is beyond ``most``: then it is empty."""
        for span in kv.media:
            if span.end <= start:
                continue
            if span.position >= end:
                break
            if not self._is_here(span.rows_key):
                return max(span.position, start)
            if span.is_whole and end < span.end:
                if span.position > start:
                    return span.position
                return span.end if span.end <= most else start
        return end

    def is_starved(self, kv: RequestKV) -> bool:
        """Return whether the next token of a request lacks its row."""
        start = kv.num_computed_tokens
        return any(span.position <= start < span.end and not self._is_here(span.rows_key) for span in kv.media)

    def rows(self, request: Request, start: int, end: int) -> list[EmbedsSpan]:
        """Return the rows of a step that computes the tokens ``start`` to ``end``."""
        rows = []
        for span in request.kv.media:
            first, last = max(span.position, start), min(span.end, end)
            if first < last or (span.is_beside and request.kv.lacks_cross):
                whole = self._entries[span.rows_key].rows
                assert whole is not None, "a step was planned without its rows"
                offset = span.row_offset - span.position
                rows.append(EmbedsSpan(first, whole if span.is_beside else whole[first + offset : last + offset]))
        return rows

    def computed(self, request: Request, end: int) -> None:
        """Free the rows that no step needs which computes tokens of a request from ``end`` on."""
        later = {span.rows_key for span in request.kv.media if _needs(request.kv, span, end)}
        if (holding := self._holdings.get(request.request_id)) is not None:
            self._release(holding, [key for key in holding.keys if key not in later])
            # What it holds may now have a gap, if an image stands again behind one that it lacks.
            self.may_get_more |= holding.is_short
            if not later:
                del self._holdings[request.request_id]

    def drop(self, request: Request) -> None:
        """Free what a request holds: it lost its blocks, or has ended."""
        if self.parked.pop(request.request_id, None) is not None:
            self._parked_tokens -= request.num_tokens
        if (holding := self._holdings.pop(request.request_id, None)) is not None:
            self._release(holding, holding.keys)

    def reset(self) -> None:
        """Forget all rows; requests that still need some ask again."""
        for request_id, holding in list(self._holdings.items()):
            self._release(holding, holding.keys)
            holding.is_short = True
            if holding.request.status not in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_ROWS):
                del self._holdings[request_id]  # it asks when it is admitted
        self.may_get_more = bool(self._holdings)

    def holders(self, key: RowsKey) -> list[str]:
        """Return the ids of the requests that need rows."""
        return list(entry.holders) if (entry := self._entries.get(key)) is not None else []

    def lose_worker(self) -> None:
        """Note that the worker has forgotten all requests that wait."""
        for request in self.parked.values():
            request.resume_status = RequestStatus.WAITING

    def take_wanted(self) -> list[RowsWanted]:
        """Return what was asked for since the last call."""
        wanted, self.wanted = self.wanted, []
        return wanted

    @property
    def has_begun(self) -> bool:
        """Whether a request waits that was preempted."""
        return any(request.resume_status is RequestStatus.PREEMPTED for request in self.parked.values())

    def fill_stats(self, stats: SchedulerStats) -> None:
        """Add the gauges and counters of rows; requests that wait for rows count as waiting."""
        stats.num_waiting += len(self.parked)
        stats.num_waiting_tokens += self._parked_tokens
        stats.num_waiting_for_rows = len(self.parked)
        stats.rows_bytes = self.num_bytes
        stats.rows_items_asked = self.num_asked
        stats.rows_items_received = self._num_received
        stats.rows_bytes_received = self._bytes_received

    def _size(self, key: RowsKey) -> int:
        return key.num_rows * key.levels * self._row_bytes

    def _is_here(self, key: RowsKey) -> bool:
        return (entry := self._entries.get(key)) is not None and entry.rows is not None

    def _is_ready(self, holding: _Holding) -> bool:
        if holding.is_short and (not holding.keys or not self._in_chunks):
            return False
        return all(map(self._is_here, holding.keys))

    def _take_ready(self, request_ids: list[str]) -> list[Request]:
        """Let those of these requests wait no longer that wait and have their rows."""
        ready = []
        for request_id in request_ids:
            if request_id in self.parked and self._is_ready(self._holdings[request_id]):
                request = self.parked.pop(request_id)
                self._parked_tokens -= request.num_tokens
                request.set_status(request.resume_status)
                ready.append(request)
        return ready

    def _hold(self, request: Request, start: int) -> _Holding | None:
        """Let a request hold the rows that it needs from ``start`` on, as far as there is room; None: it needs none."""
        request_id = request.request_id
        needed = dict.fromkeys(span.rows_key for span in request.kv.media if _needs(request.kv, span, start))
        if (holding := self._holdings.get(request_id)) is not None:
            self._release(holding, [key for key in holding.keys if key not in needed])
        if not needed:
            self._holdings.pop(request_id, None)
            return None
        if holding is None:
            holding = self._holdings[request_id] = _Holding(request, start)
        holding.start = start
        keys: list[RowsKey] = []
        for key in needed if self._in_chunks or self._has_room_for(needed) else ():
            if not self._add_holder(key, request_id):
                break
            keys.append(key)
        # A gap in what it holds would take room that lets nothing be computed.
        self._release(holding, [key for key in holding.keys if key not in keys])
        holding.keys, holding.is_short = keys, len(keys) < len(needed)
        return holding

    def _has_room_for(self, keys: Iterable[RowsKey]) -> bool:
        """Return whether there is room for all of these rows at once."""
        missing = sum(self._size(key) for key in keys if key not in self._entries)
        return self.num_bytes + missing <= self.capacity

    def _add_holder(self, key: RowsKey, request_id: str) -> bool:
        """Ask for rows, unless they are here. Returns False if there is no room for them."""
        entry = self._entries.get(key)
        if entry is None:
            if self.num_bytes + (size := self._size(key)) > self.capacity:
                return False
            self.num_asked += 1
            entry = self._entries[key] = _Entry(size, self.num_asked)
            self.num_bytes += size
        if request_id not in entry.holders:
            entry.holders[request_id] = None
            if entry.rows is None:  # also if another request has asked: who fetches rows knows who waits for them
                self.wanted.append(RowsWanted(request_id, key, entry.number))
        return True

    def _release(self, holding: _Holding, keys: list[RowsKey]) -> None:
        for key in keys:
            entry = self._entries[key]
            del entry.holders[holding.request.request_id]
            if not entry.holders:
                del self._entries[key]
                self.num_bytes -= entry.num_bytes
                self.may_get_more = True
        holding.keys = [key for key in holding.keys if key not in keys]

    def _extend_running(self, holding: _Holding) -> None:
        """Let a request that runs ask for its next rows; if it cannot go on without them, those that wait make room."""
        request = holding.request
        self._hold(request, request.kv.num_computed_tokens)
        for other in self._others_with_rows(holding):
            if holding.keys or not self.is_starved(request.kv):
                return
            # It has blocks and a seat, for which the others may wait: if it waited for their rows too, none would get
            # on.
            self._release(other, other.keys)
            other.is_short = True
            self._hold(request, request.kv.num_computed_tokens)

    def _others_with_rows(self, holding: _Holding) -> Iterator[_Holding]:
        """Yield those that hold rows and do not run, the one that asked last first."""
        for other in reversed(list(self._holdings.values())):
            if other is not holding and other.keys and other.request.status is not RequestStatus.RUNNING:
                yield other
