"""Asks output processors for the text of tokens that the mesh did not generate itself, or not for this call."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio
import msgspec

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.tasks import is_cancelled
from tokenloom.v1.output_processor_pb2 import DetokenizeRequest, DetokenizeResponse, TextOptions

if TYPE_CHECKING:
    from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorAsyncStub

Stubs: TypeAlias = "Callable[[], Sequence[OutputProcessorAsyncStub]]"

SLICE_TOKENS = 2048
"""Tokens of one call: output processors take a millisecond for them, between which they serve their streams."""
CONTEXT_TOKENS = 256
"""Tokens at the end of a prompt that are sent with the first call: more than any of them may be without text."""
MAX_CALLS, MAX_WAITING, MAX_WAITING_TOKENS = 4, 1024, 1 << 24
"""Calls that a gateway makes at a time, and what may wait: the streams of the output processors go on meanwhile."""
_RETRY_SECONDS = 0.1
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class TextState(msgspec.Struct):
    """What the text of the next tokens depends on."""

    context_ids: list[int]
    """The last tokens before them, prompt included."""
    held_text: str = ""
    """Text that may begin a stop string."""
    stop_string: str | None = None
    """The one that has ended the text; None: none has."""


class TextClient:
    """Makes text, tenants in turn. A call whose output processor is lost goes to another one, and waits while there is
    none: its own deadline cancels it."""

    def __init__(self, stubs: Stubs) -> None:
        """``stubs``: returns what calls the output processors that are connected, the next in turn first."""
        self._stubs = stubs
        self._stage = FairStage(
            MAX_CALLS, "texts", max_waiting=MAX_WAITING, max_cost=MAX_WAITING_TOKENS, leaves_spare=True
        )

    async def texts(
        self,
        state: TextState,
        token_ids: Sequence[int],
        options: TextOptions,
        tenant: str,
        *,
        ends: bool,
        min_tokens: int = 0,
    ) -> AsyncIterator[str]:
        """Yield the text of new tokens in pieces, and keep ``state``. ``ends``: the output ends with them.
        ``min_tokens``: so many of them complete no stop string.

        Raises ``InvalidArgument`` for wrong options, ``ResourceExhausted`` if too many tokens of the tenant wait.
        """
        for start in range(0, max(len(token_ids), ends), SLICE_TOKENS):
            if state.stop_string is not None:
                return
            end = start + SLICE_TOKENS
            request = DetokenizeRequest(
                context_ids=state.context_ids,
                token_ids=token_ids[start:end],
                text=options,
                held_text=state.held_text,
                ends=ends and end >= len(token_ids),
                min_tokens=max(min_tokens - start, 0),
            )
            response = await self._call(request, tenant)
            state.context_ids, state.held_text = list(response.context_ids), response.held_text
            if response.HasField("stop_string"):
                state.stop_string = response.stop_string
            yield response.text

    async def bytes_of(self, token_ids: Sequence[int], tenant: str) -> dict[int, bytes]:
        """Return the bytes of each of these tokens alone."""
        found: dict[int, bytes] = {}
        ids = sorted(set(token_ids))
        for start in range(0, len(ids), SLICE_TOKENS):
            part = ids[start : start + SLICE_TOKENS]
            response = await self._call(DetokenizeRequest(single_ids=part), tenant)
            if len(response.single_bytes) != len(part):
                raise errors.Internal("An output processor gave other tokens than it was asked for.")
            found |= zip(part, response.single_bytes, strict=True)
        return found

    async def _call(self, request: DetokenizeRequest, tenant: str) -> DetokenizeResponse:
        cost = len(request.token_ids) + len(request.single_ids) + 1
        await self._stage.begin(tenant, cost)
        try:
            while True:
                for stub in self._stubs():
                    try:
                        return await stub.Detokenize(request)
                    except grpc.aio.AioRpcError as failure:
                        if failure.code() == grpc.StatusCode.UNIMPLEMENTED:  # of an older release: another may know it
                            continue
                        if wire_errors.code_of(failure) not in _LOST:
                            raise wire_errors.from_rpc(failure) from failure
                    except asyncio.CancelledError:
                        if is_cancelled():
                            raise
                        # Otherwise its channel was closed with this call in it: it has left.
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._stage.end(tenant, cost)


def context_of(prompt_ids: Sequence[int] | None) -> TextState:
    """Return where the text of an output of this prompt begins. Raises ``InvalidArgument`` for a wrong id."""
    ids = list(prompt_ids or ())[-CONTEXT_TOKENS:]
    if any(each < 0 or each >= 1 << 32 for each in ids):
        raise errors.InvalidArgument("prompt_token_ids must hold token ids", "prompt_token_ids")
    return TextState(ids)
