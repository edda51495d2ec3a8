"""One leg of a request: an attempt at it, or at its beginning, on one engine."""

from collections.abc import Sequence
from typing import Protocol

from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVSource
from tokenloom.v1.types_pb2 import Logprobs

from ..placement.placement import Placement


class LegOwner(Protocol):
    """Hears what becomes of its legs. Not called any more for a leg that finished, was lost or was aborted."""

    def on_kv_granted(self, leg: "Leg", kv: KVSource) -> None: ...

    def on_prompt_logprobs(self, leg: "Leg", token_index: int, logprobs: Logprobs) -> None: ...

    def on_tokens(self, leg: "Leg", token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None) -> None: ...

    def on_finished(self, leg: "Leg", finished: Finished) -> None: ...

    def on_lost(self, leg: "Leg") -> None: ...


class Leg:
    """Fulfils ``AttemptSink``.

    Attributes:
        placement: Where it is.
        num_accepted: Output tokens that its engine was given with it.
        has_output: Whether its engine has sent any.
    """

    __slots__ = ("_owner", "_slot", "has_output", "is_live", "num_accepted", "placement")

    def __init__(self, owner: LegOwner, placement: Placement, num_accepted: int) -> None:
        self._owner = owner
        self._slot = 0
        self.placement = placement
        self.num_accepted = num_accepted
        self.has_output = False
        self.is_live = False

    def send(self, request: AddRequest) -> None:
        """Hands it to the engine; ``Unavailable`` if that just died."""
        self._slot = self.placement.link.add(request, self)
        self.is_live = True

    def accept(self, token_ids: Sequence[int]) -> None:
        """The tokens that it awaits."""
        if self.is_live:
            self.placement.link.accept(self._slot, token_ids)

    def stop_at(self, num_tokens: int) -> None:
        """A stop string was found after so many output tokens."""
        if self.is_live:
            self.placement.link.stop_at(self._slot, num_tokens)

    def abort(self) -> None:
        """No more of it is wanted."""
        if self.is_live:
            self.is_live = False
            self.placement.link.abort(self._slot)

    def drop_kv(self) -> None:
        """The KV that it left, finished, is not wanted."""
        self.placement.link.drop_kv(self._slot)

    def on_kv_granted(self, kv: KVSource) -> None:
        self._owner.on_kv_granted(self, kv)

    def on_prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> None:
        self._owner.on_prompt_logprobs(self, token_index, logprobs)

    def on_tokens(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> None:
        self.has_output = True
        self._owner.on_tokens(self, token_index, token_ids, logprobs)

    def on_finished(self, finished: Finished) -> None:
        self.is_live = False
        self._owner.on_finished(self, finished)

    def on_lost(self) -> None:
        self.is_live = False
        self._owner.on_lost(self)
