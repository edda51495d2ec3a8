"""Steps → frames of one stream, in columns. Without I/O: steps that wait for credit merge here."""

from dataclasses import dataclass

from tokenloom.v1 import engine_pb2, types_pb2

DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own limit: of a peer that names none."""

# Upper bounds of what a field costs on the wire.
_FRAME_BYTES = 64
_ROW_BYTES = 20  # slot, token_index and num_tokens, varints of at most 5 bytes each, and the columns' growing lengths
_TOKEN_BYTES = 5
_MIN_MESSAGE_BYTES = 1024


@dataclass(slots=True)
class _Row:
    token_index: int
    token_ids: list[int]


class FrameBuilder:
    """Tokens and ends that were not sent yet. Holds at most what the live slots of its stream may still produce."""

    def __init__(self, max_message_bytes: int = 0) -> None:
        """``max_message_bytes``: as in the peer's Hello; 0: it named none."""
        self._max_bytes = max(max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES, _MIN_MESSAGE_BYTES)
        self._rows: dict[int, _Row] = {}
        self._finished: dict[int, engine_pb2.Finished] = {}
        self._grants: dict[int, engine_pb2.KVGrant] = {}

    @property
    def has_data(self) -> bool:
        return bool(self._rows or self._finished or self._grants)

    def add_tokens(self, slot: int, token_index: int, token_ids: list[int]) -> None:
        """Appends what a step produced; the list is kept. ``token_index`` is that of the first, and leaves no gap."""
        row = self._rows.get(slot)
        if row is None:
            self._rows[slot] = _Row(token_index, token_ids)
        else:
            assert token_index == row.token_index + len(row.token_ids), f"slot {slot}: a gap at token {token_index}"
            row.token_ids.extend(token_ids)

    def grant(self, slot: int, kv: engine_pb2.KVSource) -> None:
        """A lease was granted ahead of the slot's first token; not worth telling any more once the slot ended."""
        self._grants[slot] = engine_pb2.KVGrant(slot=slot, kv=kv)

    def finish(self, finished: engine_pb2.Finished) -> None:
        """Ends a slot, once; its tokens go first or in the same frame."""
        assert finished.slot not in self._finished, f"slot {finished.slot} finished twice"
        self._finished[finished.slot] = finished
        self._grants.pop(finished.slot, None)

    def cut(self, slot: int, num_tokens: int) -> None:
        """A stop string was found: drops later tokens, and changes an end that waits here to a stop."""
        row = self._rows.get(slot)
        if row is not None:
            del row.token_ids[max(num_tokens - row.token_index, 0) :]
            if not row.token_ids:
                del self._rows[slot]
        if (finished := self._finished.get(slot)) is not None:
            finished.reason = types_pb2.FINISH_REASON_STOP
            finished.num_output_tokens = min(num_tokens, finished.num_output_tokens)
            for field in ("stop_token_id", "error", "kv"):
                finished.ClearField(field)

    def take(self, step: int) -> engine_pb2.EngineFrame:
        """The next frame: all that waits, or as much of it as one message holds."""
        room = self._max_bytes - _FRAME_BYTES
        grants = self._take_grants(room // 2)
        room -= sum(grant.ByteSize() + 8 for grant in grants)
        slots, indices, counts, token_ids = [], [], [], []
        rows, self._rows = self._rows, {}
        for slot, row in rows.items():
            count = min(len(row.token_ids), (room - _ROW_BYTES) // _TOKEN_BYTES)
            if count <= 0:
                self._rows[slot] = row
                continue
            slots.append(slot)
            indices.append(row.token_index)
            counts.append(count)
            if count == len(row.token_ids):
                token_ids += row.token_ids
            else:
                token_ids += row.token_ids[:count]
                self._rows[slot] = _Row(row.token_index + count, row.token_ids[count:])
            room -= _ROW_BYTES + _TOKEN_BYTES * count
        return engine_pb2.EngineFrame(
            step=step,
            slot=slots,
            token_index=indices,
            num_tokens=counts if len(token_ids) != len(slots) else (),
            token_ids=token_ids,
            finished=self._take_finished(room, at_least=0 if slots or grants else 1),
            kv_granted=grants,
        )

    def _take_grants(self, room: int) -> list[engine_pb2.KVGrant]:
        """As many as fit, at least one: all name the same engine, so that they are about equally large."""
        if not self._grants:
            return []
        grants = list(self._grants.values())
        count = max(room // (grants[0].ByteSize() + 16), 1)
        self._grants = {grant.slot: grant for grant in grants[count:]}
        return grants[:count]

    def _take_finished(self, room: int, at_least: int) -> list[engine_pb2.Finished]:
        """Ends whose tokens are all on their way, as many as fit."""
        taken: list[engine_pb2.Finished] = []
        finished, self._finished = self._finished, {}
        for slot, end in finished.items():
            num_bytes = end.ByteSize() + 8
            if slot in self._rows or (num_bytes > room and len(taken) >= at_least):
                self._finished[slot] = end
            else:
                room -= num_bytes
                taken.append(end)
        return taken
