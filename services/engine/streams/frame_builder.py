"""Builds the columnar frames of one stream from steps. Steps that wait for credit merge into one frame, as do steps in
quick succession. No I/O."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.request import logprob_columns
from tokenloom.v1 import engine_pb2, types_pb2

DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's default limit, for a peer that sends none."""

# Upper bounds of the size of a field on the wire.
_FRAME_BYTES = 64
_ROW_BYTES = 20  # slot, token_index and num_tokens, varints of at most 5 bytes each, and the columns' growing lengths
_TOKEN_BYTES = 5
_LOGPROBS_BYTES = 48  # of one slot, without its positions
_POSITION_BYTES = 9  # a float and a rank; an alternative (a float and a token id) has the same size
_POOLED_BYTES = 64  # of one part without its numbers
# Of the log probabilities of prompts in one frame. Each of the 14,000 becomes a text in the output processor, whose
# event loop serves no other request meanwhile: the 2,097,152 that one request may have took 0.6 s, these take 5 ms.
_PROMPT_BYTES = 1 << 17
_MIN_MESSAGE_BYTES = 1024
_UNWANTED = (
    types_pb2.FINISH_REASON_ABORT,
    types_pb2.FINISH_REASON_ERROR,
)  # data of such a slot that was not sent yet is dropped


def wire_logprobs(logprobs: Logprobs, start: int = 0, stop: int | None = None) -> types_pb2.Logprobs:
    """Return the positions from ``start`` up to ``stop`` as a message; all of them without ``stop``."""
    sampled, rank, top = logprobs.sampled, logprobs.rank, logprobs.top
    token_ids, values = logprobs.token_ids, logprobs.logprobs
    if stop is not None:  # an output token's columns are taken whole: this runs for each of them
        sampled, rank = sampled[start:stop], rank[start:stop]
        token_ids, values = token_ids[start * top : stop * top], values[start * top : stop * top]
    return types_pb2.Logprobs(sampled=sampled, rank=rank, top=top, token_id=token_ids, logprob=values)


class _Row(msgspec.Struct):
    token_index: int
    token_ids: list[int]
    logprobs: types_pb2.Logprobs | None = None
    """Log probabilities of all of ``token_ids``, if the request asks for them."""

    def split(self, count: int) -> "_Row":
        """Keep the first ``count`` tokens and return the rest."""
        size = len(self.token_ids)
        rest = _Row(self.token_index + count, self.token_ids[count:])
        self.token_ids = self.token_ids[:count]
        if self.logprobs is not None:
            rest.logprobs = logprob_columns.part(self.logprobs, count, size)
            self.logprobs = logprob_columns.part(self.logprobs, 0, count)
        return rest


class FrameBuilder:
    """Holds tokens and ends that were not sent yet: at most what the live slots of its stream may still produce."""

    def __init__(self, max_message_bytes: int = 0) -> None:
        """``max_message_bytes``: as in the peer's Hello; 0 if it sent none."""
        self._max_bytes = max(max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES, _MIN_MESSAGE_BYTES)
        self._rows: dict[int, _Row] = {}
        self._begun: list[int] = []  # slots of rows that begin with an output's first token
        self._num_tokens = 0  # upper bound of the tokens in the rows
        self._num_with_logprobs = 0  # upper bound of the rows with log probabilities
        self._finished: dict[int, engine_pb2.Finished] = {}
        self._grants: dict[int, engine_pb2.KVGrant] = {}
        self._prompts: dict[int, tuple[int, Logprobs]] = {}  # with the number of positions that were taken
        # Results of pooling requests with the number of values already taken; the slots are in `_finished`, too.
        self._pooled: dict[int, tuple[npt.NDArray[np.float32], int]] = {}
        self.is_urgent = False
        """Whether the data contains something that a client or an engine waits for: a first token, an end, a lease."""

    @property
    def has_data(self) -> bool:
        return bool(self._rows or self._finished or self._grants or self._prompts)

    def add_tokens(
        self, slot: int, token_index: int, token_ids: list[int], logprobs: types_pb2.Logprobs | None = None
    ) -> None:
        """Append the tokens of a step; the list and the columns are kept, not copied. ``token_index`` is the index of
        the first token and follows the last one without a gap."""
        self._num_tokens += len(token_ids)
        self._num_with_logprobs += logprobs is not None
        row = self._rows.get(slot)
        if row is None:
            self._rows[slot] = _Row(token_index, token_ids, logprobs)
            if not token_index:
                self._begun.append(slot)
                self.is_urgent = True
            return
        assert token_index == row.token_index + len(row.token_ids), f"slot {slot}: gap before token {token_index}"
        # Appending to the row is what makes a frame of two steps cost about as much as a frame of one.
        row.token_ids.extend(token_ids)
        if logprobs is not None:
            assert row.logprobs is not None, f"slot {slot}: only some of its tokens have log probabilities"
            logprob_columns.extend(row.logprobs, logprobs)

    def add_prompt(self, slot: int, logprobs: Logprobs) -> None:
        """Add the log probabilities of the prompt from its second token on, once, before the slot's tokens."""
        self._prompts[slot] = 0, logprobs
        self.is_urgent = True

    def add_pooled(self, slot: int, result: npt.NDArray[np.float32]) -> None:
        """Add the result of a pooling request, once; the caller ends the slot before the next frame."""
        self._pooled[slot] = result, 0

    def grant(self, slot: int, kv: engine_pb2.KVSource | None, target: str | None = None) -> None:
        """Announce a lease ahead of the slot's end; dropped if the slot ends before it is sent. ``target``: as in
        ``KVGrant`` of a slot that moves, and None for a prefill leg."""
        self._grants[slot] = engine_pb2.KVGrant(slot=slot, kv=kv, moves=target is not None, target=target)
        self.is_urgent = True

    def finish(self, finished: engine_pb2.Finished) -> None:
        """End a slot, once. Its tokens are sent before or in the same frame."""
        assert finished.slot not in self._finished, f"slot {finished.slot} finished twice"
        self._finished[finished.slot] = finished
        self.is_urgent = True
        self._grants.pop(finished.slot, None)
        if finished.reason in _UNWANTED:
            self._prompts.pop(finished.slot, None)
            self._pooled.pop(finished.slot, None)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Drop the tokens after a stop string, and turn an end that was not sent yet into a stop."""
        row = self._rows.get(slot)
        if row is not None:
            kept = max(num_tokens - row.token_index, 0)
            del row.token_ids[kept:]
            if row.logprobs is not None:
                row.logprobs = logprob_columns.part(row.logprobs, 0, kept)
            if not row.token_ids:
                del self._rows[slot]
        if (finished := self._finished.get(slot)) is not None:
            # The core had ended the request by itself, after tokens that the client does not get: its reason does not
            # count.
            finished.reason = types_pb2.FINISH_REASON_STOP
            finished.num_output_tokens = min(num_tokens, finished.num_output_tokens)
            for field in ("stop_token_id", "error", "kv"):
                finished.ClearField(field)

    def take(self, step: int) -> engine_pb2.EngineFrame:
        """Return the next frame: everything that waits, or as much as one message holds. First tokens come first,
        because the receiver processes a frame in order."""
        if self._begun:
            begun = {
                slot: self._rows[slot] for slot in self._begun if slot in self._rows
            }  # others were cut off by a stop
            self._rows = begun | self._rows
            self._begun = []
        bytes_left = self._max_bytes - _FRAME_BYTES
        if not (self._finished or self._grants or self._prompts or self._num_with_logprobs) and (
            _ROW_BYTES * len(self._rows) + _TOKEN_BYTES * self._num_tokens <= bytes_left
        ):
            # A frame of nothing but tokens is nearly every step's case, and needs no sizes to be computed.
            return self._take_tokens(step)
        frame = self._take_mixed(step, bytes_left)
        self.is_urgent = self.has_data  # what did not fit must not wait for the next interval
        if not self._rows:
            self._num_tokens = self._num_with_logprobs = 0
        return frame

    def take_urgent(self, step: int) -> engine_pb2.EngineFrame:
        """Return a frame of what is waited for alone: first tokens, leases, and ends with the tokens before them.

        The tokens of other slots keep waiting, because a frame costs the services as much as the slots in it. If they
        are all that is left, because they did not fit before, the frame is theirs.
        """
        urgent = {*self._begun, *self._finished, *self._prompts}
        # Only between two frames. If a frame is due anyway everything goes in it: one more frame for each step cost 9 %
        # more CPU at steps of 20 ms, and first tokens came no earlier.
        waiting = {slot: row for slot, row in self._rows.items() if slot not in urgent}
        if len(waiting) == len(self._rows) and not (self._finished or self._grants or self._prompts):
            return self.take(step)
        num_tokens = sum(len(row.token_ids) for row in waiting.values())
        num_with_logprobs = sum(row.logprobs is not None for row in waiting.values())
        self._rows = {slot: row for slot, row in self._rows.items() if slot in urgent}
        self._num_tokens -= num_tokens
        self._num_with_logprobs -= num_with_logprobs
        frame = self.take(step)
        self._rows |= waiting
        self._num_tokens += num_tokens
        self._num_with_logprobs += num_with_logprobs
        return frame

    def _take_mixed(self, step: int, bytes_left: int) -> engine_pb2.EngineFrame:
        """Return a frame with as much of everything that waits as fits into ``bytes_left`` bytes."""
        grants = self._take_grants(bytes_left // 2)
        bytes_left -= sum(grant.ByteSize() + 8 for grant in grants)
        logprobs = self._take_prompts(bytes_left) if self._prompts else []
        bytes_left -= sum(each.ByteSize() + 8 for each in logprobs)
        pooled = self._take_pooled(bytes_left) if self._pooled else []
        bytes_left -= sum(_POOLED_BYTES + len(part.data) for part in pooled)
        is_empty = not (grants or logprobs or pooled)
        slots, indices, counts, token_ids = [], [], [], []
        for slot, row, count in self._take_rows(bytes_left, is_alone=is_empty):
            slots.append(slot)
            indices.append(row.token_index)
            counts.append(count)
            token_ids += row.token_ids
            bytes_left -= _ROW_BYTES + _TOKEN_BYTES * count
            if row.logprobs is not None:
                logprobs.append(_slot_logprobs(slot, row.token_index, row.logprobs))
                bytes_left -= logprobs[-1].ByteSize() + 8
        finished = self._take_finished(bytes_left, at_least=0 if slots or not is_empty else 1)
        return engine_pb2.EngineFrame(
            step=step,
            slot=slots,
            token_index=indices,
            num_tokens=counts if len(token_ids) != len(slots) else (),
            token_ids=token_ids,
            finished=finished,
            logprobs=logprobs,
            kv_granted=grants,
            pooled=pooled,
        )

    def _take_tokens(self, step: int) -> engine_pb2.EngineFrame:
        """Return a frame of all rows, if nothing else waits and they fit: the case of nearly every step."""
        rows, self._rows, self._num_tokens = self._rows, {}, 0
        self.is_urgent = False
        counts = [len(row.token_ids) for row in rows.values()]
        return engine_pb2.EngineFrame(
            step=step,
            slot=rows,
            token_index=[row.token_index for row in rows.values()],
            num_tokens=() if counts.count(1) == len(counts) else counts,
            token_ids=[token_id for row in rows.values() for token_id in row.token_ids],
        )

    def _take_rows(self, bytes_left: int, *, is_alone: bool) -> list[tuple[int, _Row, int]]:
        """Return the rows, or first parts of rows, that fit, each with its number of tokens. Returns at least one token
        if the frame is otherwise empty (``is_alone``)."""
        taken: list[tuple[int, _Row, int]] = []
        rows, self._rows = self._rows, {}
        for slot in self._prompts:  # the prompt's log probabilities are sent before the slot's tokens
            if (row := rows.pop(slot, None)) is not None:
                self._rows[slot] = row
        for slot, row in rows.items():
            fixed, per_token = (_ROW_BYTES, _TOKEN_BYTES) if row.logprobs is None else _cost(row.logprobs)
            size = count = len(row.token_ids)
            if bytes_left < fixed + per_token * size:
                count = max((bytes_left - fixed) // per_token, 0)
                if not count and is_alone and not taken:
                    count = 1  # the peer accepts tiny messages only, and one token has many alternatives
                if count < size:
                    self._rows[slot] = row.split(count) if count else row
            if count:
                taken.append((slot, row, count))
                bytes_left -= fixed + per_token * count
        return taken

    def _take_prompts(self, bytes_left: int) -> list[engine_pb2.SlotLogprobs]:
        """Return as many positions of prompts' log probabilities as fit, at least one."""
        bytes_left = min(bytes_left, _PROMPT_BYTES)
        taken: list[engine_pb2.SlotLogprobs] = []
        prompts, self._prompts = self._prompts, {}
        for slot, (start, logprobs) in prompts.items():
            size = len(logprobs.sampled) - start
            per_position = _POSITION_BYTES * (1 + logprobs.top)
            count = min(size, max((bytes_left - _LOGPROBS_BYTES) // per_position, 0 if taken else 1))
            if count < size:
                self._prompts[slot] = start + count, logprobs
            if count > 0:
                part = wire_logprobs(logprobs, start, start + count)
                taken.append(_slot_logprobs(slot, 1 + start, part, of_prompt=True))
                bytes_left -= _LOGPROBS_BYTES + per_position * count
        return taken

    def _take_pooled(self, bytes_left: int) -> list[types_pb2.Pooled]:
        """Return as many numbers of results as fit, at least one."""
        taken: list[types_pb2.Pooled] = []
        waiting, self._pooled = self._pooled, {}
        for slot, (result, start) in waiting.items():
            count = min(result.size - start, max((bytes_left - _POOLED_BYTES) // 4, 0 if taken else 1))
            if start + count < result.size:
                self._pooled[slot] = result, start + count
            if count or (not result.size and bytes_left >= _POOLED_BYTES):
                data = np.ascontiguousarray(result, "<f4").reshape(-1)[start : start + count].tobytes()
                taken.append(types_pb2.Pooled(slot=slot, shape=result.shape, offset=start, data=data))
                bytes_left -= _POOLED_BYTES + 4 * count
            elif not result.size:
                self._pooled[slot] = result, start
        return taken

    def _take_grants(self, bytes_left: int) -> list[engine_pb2.KVGrant]:
        """Return as many grants as fit, at least one. All name the same engine, so their sizes are about equal."""
        if not self._grants:
            return []
        grants = list(self._grants.values())
        count = max(bytes_left // (grants[0].ByteSize() + 16), 1)
        self._grants = {grant.slot: grant for grant in grants[count:]}
        return grants[:count]

    def _take_finished(self, bytes_left: int, at_least: int) -> list[engine_pb2.Finished]:
        """Return the ends whose tokens have all been taken, as many as fit."""
        taken: list[engine_pb2.Finished] = []
        finished, self._finished = self._finished, {}
        for slot, end in finished.items():
            num_bytes = end.ByteSize() + 8
            waits = slot in self._rows or slot in self._prompts or slot in self._pooled
            if waits or (num_bytes > bytes_left and len(taken) >= at_least):
                self._finished[slot] = end
            else:
                bytes_left -= num_bytes
                taken.append(end)
        return taken


def _cost(logprobs: types_pb2.Logprobs) -> tuple[int, int]:
    """Return the bytes of a row with log probabilities, and of each of its tokens."""
    return _ROW_BYTES + _LOGPROBS_BYTES, _TOKEN_BYTES + _POSITION_BYTES * (1 + logprobs.top)


def _slot_logprobs(
    slot: int, token_index: int, logprobs: types_pb2.Logprobs, *, of_prompt: bool = False
) -> engine_pb2.SlotLogprobs:
    return engine_pb2.SlotLogprobs(slot=slot, prompt=of_prompt, token_index=token_index, logprobs=logprobs)


_GRAIN_SECONDS = 0.001
"""Event loops keep time in milliseconds: a frame that is due within one counts as due."""
_PATIENCE = 0.5
"""A frame that is due waits for the end of the next step, for so much of the interval at most: a wake-up between two
steps would send the same tokens at the price of waking every service."""
_MANY_STREAMS = 16
"""With fewer requests the interval is half as long: a frame of few rows costs the services little, and the tokens of a
fast model reach its few readers in smaller pieces."""


class _Loop(Protocol):
    """Describes what is needed of an event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle: ...


class FramePace:
    """Keeps an interval between frames: a frame of two steps costs each service about as much as a frame of one."""

    def __init__(self, interval: float, wake: Callable[[], None], loop: _Loop) -> None:
        """``interval``: minimum seconds between frames of many streams. ``wake``: called when a frame had to wait and
        no step has ended since it is due."""
        self._interval = interval
        self._wake = wake
        self._loop = loop
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def is_due(self, *, urgent: bool) -> bool:
        """Return whether a frame may be sent now; an ``urgent`` one always may. If not, ``wake`` will be called."""
        if urgent or not self._interval:
            return True
        # A frame of two steps costs the services about as much as a frame of one, and on shared cores the model waits
        # for them: the tiny model's streams got 1.2 times as many tokens a second. Holding outputs back in the core as
        # well saved at most 2 % of the CPU more, less than runs differ.
        wait = self._next_at - self._loop.time()
        if wait < _GRAIN_SECONDS:
            return True
        if self._timer is None:
            # Not at the end of the interval: a timer between two steps woke three services for the tokens of one step.
            # Going with the next step saved 5 % of the CPU, and tokens wait for at most 12 ms instead of 8.
            self._timer = self._loop.call_later(wait + _PATIENCE * self._interval, self._ring)
        return False

    def sent(self, num_streams: int) -> None:
        """Note that a frame is being sent now, on a connection with ``num_streams`` live requests."""
        if self._interval:
            # One stream of a tiny model got 14 tokens every 8 ms. With half of the interval its events come every 4.0
            # ms in the median (p99 6.4 instead of 11.3), for at most 5 % fewer tokens a second.
            share = 1.0 if num_streams >= _MANY_STREAMS else 0.5
            self._next_at = self._loop.time() + share * self._interval
            self.close()

    def close(self) -> None:
        """Cancel a pending call of ``wake``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._wake()
