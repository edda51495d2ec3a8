"""Calls to the tokenizer replicas. They are stateless, so a call that one replica cannot answer goes to another."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors, packed_ids, wire_errors
from tokenloom.request.packed_ids import LONG_PROMPT
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import fingerprint_difference
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget, RetryDebt
from tokenloom.services.runtime.streams.slotted_stream import ANY_TOKEN, MAX_WRONG_FRAMES, was_silent
from tokenloom.services.runtime.tasks import is_cancelled
from tokenloom.services.runtime.telemetry.tracing import CURRENT
from tokenloom.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from ..metrics.usage_counts import CALL_BILL
from ..records.generate_request import Chat

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Interval of the probes of each replica. gRPC's pings notice a replica that was stopped or cut off within 2.6 s."""
MAX_CALLS = 16
"""Calls in flight; further ones wait here for their tenants' turns. Each answer of gRPC waits for the interpreter's
lock: with thousands of calls on a busy machine, gRPC took the connection for dead and failed all of them."""
MAX_LONG_CALLS = 4
"""Long calls in flight, beside the others: two tokenizers with two texts each are busy then."""
LONG_BYTES = 64 << 10
"""A call of more bytes is long: tokenizers compute it in a process of its own."""
MAX_WAITING = 16_384
"""Calls of each kind that wait; admission refuses requests sooner."""
MAX_WAITING_BYTES = 256 << 20
"""Of the calls of each kind that run and wait."""
_CALL_BYTES = 512
"""What a call costs beside its own bytes."""
ANSWER_SECONDS = 6.0
"""How long a replica may take to answer a probe: its event loop may be busy for 5 s."""


LEAVE_SECONDS = 10.0
"""How long the channel to a replica stays open that this gateway does not work with any more, for calls in flight."""
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.05, 1.0
"""How long a call waits, at first and at most, until it asks again where no replica could answer. It asks at once when
one does that did not."""
LOST_IN_A_ROUND, MAX_LOST_ROUNDS = 2, 5
"""Replicas that may be lost one after the other while they have one text, until the call waits; and how often that may
happen, until it ends, because the text itself may end them."""
_Request: TypeAlias = (
    tokenizer_pb2.EncodeRequest
    | tokenizer_pb2.EncodeChatRequest
    | tokenizer_pb2.EncodeTranscriptRequest
    | tokenizer_pb2.DecodeRequest
)
MAX_WRONG = 5
"""Wrong answers to one call after which it ends."""
_MAX_PACKED_BYTES = 8 << 20
"""Texts of more bytes are not packed: each byte may be a token, of four bytes, and a message may have 64 MiB."""
_SHORT_ANSWER = packed_ids.ID_BYTES * LONG_PROMPT
"""Bytes of an answer without packed ids, unless it has many prompts."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How gRPC ends calls whose connection was lost."""


class TokenizerClient:
    """Spreads calls over the replicas that answer and serve the same as the first one, in turn.

    Attributes:
        info: What the replicas serve; None until the first one has answered.
    """

    def __init__(self, members: PeerMembers, channels: Channels, fall_backs: FallBacks | None = None) -> None:
        """``fall_backs``: where it is noted that a replica serves something else; None: nowhere."""
        self._members = members
        self._channels = channels
        self._fall_backs = fall_backs or FallBacks()
        self._stubs: dict[str, tokenizer_pb2_grpc.TokenizerAsyncStub] = {}  # by address, one for each replica
        self._alive: set[str] = set()
        self._turn = 0
        self._budget = RetryBudget(asyncio.get_running_loop().time)
        most, size = MAX_WAITING, MAX_WAITING_BYTES
        self._short = FairStage(MAX_CALLS, "texts", max_waiting=most, max_cost=size)
        self._long = FairStage(MAX_LONG_CALLS, "long texts", max_waiting=most, max_cost=size, leaves_spare=True)
        self._known = asyncio.Event()
        self._num_wrong = Counter[str]()  # answers by replica
        self._left = set[str]()  # the replicas that gave MAX_WRONG_FRAMES of them: asked while there is no other
        self._came = asyncio.Event()  # a new one for each replica that answers again
        self.info: tokenizer_pb2.GetTokenizerInfoResponse | None = None

    @property
    def num_alive(self) -> int:
        """Return how many replicas answer."""
        return len(self._alive)

    @property
    def num_known(self) -> int:
        """Return how many replicas should answer."""
        return len(self._stubs)

    def replicas(self) -> list[bool]:
        """Return whether each replica answers, in the order of their addresses."""
        return [address in self._alive for address in sorted(self._stubs)]

    async def wait_known(self) -> tokenizer_pb2.GetTokenizerInfoResponse:
        """Return what the replicas serve, once the first one has answered."""
        await self._known.wait()
        assert self.info is not None
        return self.info

    async def run(self) -> None:
        """Keep the channels and probe every replica, until cancelled."""
        async with asyncio.TaskGroup() as group:

            def joined(address: str) -> None:
                if address not in self._stubs:
                    group.create_task(self._keep(address), name=f"probe tokenizer {address}")

            await self._members.watch(joined)

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        hash_salt: bytes | None = None,
        want_token_strings: bool = False,
        second_texts: Sequence[str] = (),
        max_tokens: int = 0,
        keep_first: bool = False,
        prompt_name: str | None = None,
        takes_packed_ids: bool = False,
        tenant: str = "",
    ) -> Awaitable[tokenizer_pb2.EncodeResponse]:
        """Return token ids of each text, with block hashes under the tenant's ``hash_salt``; None: without hashes.

        The call waits for a turn of the ``tenant``; empty: the gateway's own. ``second_texts``, ``max_tokens``,
        ``keep_first``, ``prompt_name``, ``takes_packed_ids``: as in ``EncodeRequest``.
        """
        request = tokenizer_pb2.EncodeRequest(
            texts=texts,
            add_special_tokens=add_special_tokens,
            want_hashes=hash_salt is not None,
            cache_salt=hash_salt or b"",
            want_token_strings=want_token_strings,
            second_texts=second_texts,
            max_tokens=max_tokens,
            keep_first=keep_first,
            prompt_name=prompt_name,
            takes_packed_ids=takes_packed_ids and sum(map(len, texts)) <= _MAX_PACKED_BYTES,
            tenant=tenant,
        )
        return self._call("Encode", request)

    def encode_chat(
        self,
        chat: Chat,
        *,
        hash_salt: bytes | None = None,
        want_token_strings: bool = False,
        tenant: str = "",
        media: Sequence[tokenizer_pb2.MediaSize] = (),
    ) -> Awaitable[tokenizer_pb2.EncodeChatResponse]:
        """Return token ids of a rendered conversation, packed if it is long, with block hashes as :meth:`encode`.

        ``media``: its images, in the order of their parts.
        """
        # Of ids that are known, nothing is rendered; one call does both, because all that follows is the same.
        request = tokenizer_pb2.EncodeChatRequest(
            messages_json=chat.messages_json,
            tools_json=chat.tools_json,
            template_kwargs_json=chat.template_kwargs_json,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            want_hashes=hash_salt is not None,
            cache_salt=hash_salt or b"",
            want_token_strings=want_token_strings,
            takes_packed_ids=len(chat.messages_json) <= _MAX_PACKED_BYTES,
            tenant=tenant,
            media=media,
            token_ids=chat.token_ids,
        )
        return self._call("EncodeChat", request)

    def encode_transcript(
        self, request: tokenizer_pb2.EncodeTranscriptRequest
    ) -> Awaitable[tokenizer_pb2.EncodeTranscriptResponse]:
        """Return the prompt of a piece of a sound."""
        return self._call("EncodeTranscript", request)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, tenant: str = ""
    ) -> Awaitable[tokenizer_pb2.DecodeResponse]:
        """Return the text of a complete sequence."""
        request = tokenizer_pb2.DecodeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens, tenant=tenant
        )
        return self._call("Decode", request)

    async def _call(self, method: str, request: _Request) -> Any:
        """Ask the next living replica in turn, when it is the tenant's turn; if it is unavailable, ask another
        one, as the budget permits, or wait for one. The request's own deadline cancels the call from outside, also
        while it waits."""
        retries: CallRetries | None = None
        cost = request.ByteSize() + _CALL_BYTES
        stage = self._short if cost <= LONG_BYTES else self._long
        while True:
            # 2,600 texts at once made gRPC's pings late, and gRPC took the living tokenizer's connection for dead: up
            # to 441 requests failed.
            await stage.begin(request.tenant, cost)
            try:
                if retries is None:
                    self._budget.add_request()
                    # A retry goes on from this call's own turn. Counted from the shared one, which calls in between had
                    # moved, it could reach the lost tokenizer again: one of 250 requests failed that way.
                    self._turn = turn = self._turn + 1
                alive = sorted(self._alive)
                if self._left:
                    alive = [address for address in alive if address not in self._left] or alive
                at = turn % len(alive) if alive else 0
                for address in alive[at:] + alive[:at]:
                    if retries is not None and not (address in self._alive and retries.may_ask()):
                        continue
                    try:
                        stub = self._stubs[address]
                        answer = await getattr(stub, method)(request, metadata=tuple(CURRENT.get().items()))
                        # A text of so few bytes has no more tokens; the size of an answer is not free.
                        if stage is self._short and (cost <= LONG_PROMPT or answer.ByteSize() <= _SHORT_ANSWER):
                            fits = self._fits(request, answer)
                        else:  # off the event loop: it takes milliseconds, and the first one imports numpy
                            fits = await asyncio.to_thread(self._fits, request, answer)
                        if fits:
                            if answer.cpu_ns and (bill := CALL_BILL.get()) is not None:
                                bill.tokenizer_ns += answer.cpu_ns
                            return answer
                        self._note_wrong(address)
                        retries = retries or CallRetries(self._budget)
                        retries.failed(None)
                    except grpc.aio.AioRpcError as failure:
                        if wire_errors.was_cut(failure):
                            self._alive.discard(address)
                        retries = retries or CallRetries(self._budget)
                        retries.failed(failure, is_back=partial(self._answers, address))
                    except asyncio.CancelledError:
                        if is_cancelled():
                            raise
                        # The channel of a replica that has left was closed with this call in it.
                        self._alive.discard(address)
                        retries = retries or CallRetries(self._budget)
                        retries.lost()
            finally:
                stage.end(request.tenant, cost)
            # Without a place: a text that a living tokenizer takes must not wait for a chat that none can render.
            retries = retries or CallRetries(self._budget)
            await retries.pause(self._came)

    def _answers(self, address: str) -> bool:
        return address in self._alive

    def _fits(self, request: _Request, answer: Any) -> bool:
        """Return whether an answer may be that of the request: a prompt for each text, of tokens that there are."""
        if isinstance(request, tokenizer_pb2.DecodeRequest):
            return True
        size = self.info.vocab_size if self.info is not None and self.info.vocab_size else ANY_TOKEN
        if isinstance(request, tokenizer_pb2.EncodeTranscriptRequest):
            ids = answer.prompt.token_ids
            return bool(ids) and max(ids) < size and len(answer.prompt.media) == 1
        prompts = [answer.prompt] if isinstance(request, tokenizer_pb2.EncodeChatRequest) else answer.prompts
        for prompt in prompts:
            num_tokens = len(prompt.token_ids)
            if num_tokens and max(prompt.token_ids) >= size:
                return False
            if packed := prompt.packed_token_ids:
                if num_tokens or not packed_ids.are_ids(packed, size):
                    return False
                num_tokens = len(packed) // packed_ids.ID_BYTES
            if max(prompt.first_part_tokens, prompt.skipped_tokens) > num_tokens:
                return False
            if request.want_token_strings and len(prompt.token_strings) != num_tokens:
                return False
        return len(prompts) == (1 if isinstance(request, tokenizer_pb2.EncodeChatRequest) else len(request.texts))

    def _note_wrong(self, address: str) -> None:
        log.warning("tokenizer %s: the answer is not that of its request", address)
        self._num_wrong[address] += 1
        if self._num_wrong[address] >= MAX_WRONG_FRAMES:
            self._left.add(address)
            self._fall_backs.begin("wrong_peer", "it gave invalid answers", address)

    def _forgive(self, address: str) -> None:
        """Forget what a replica has sent, which does not answer any more: it may be restarted."""
        self._num_wrong.pop(address, None)
        if address in self._left:
            self._left.discard(address)
            self._fall_backs.end("wrong_peer", address)

    async def _keep(self, address: str) -> None:
        """Probe a replica until it neither answers nor is a member any more, or another gateway works with it."""
        async with self._channels.open(address, "tokenizer") as channel:
            self._stubs[address] = tokenizer_pb2_grpc.TokenizerStub(channel)
            try:
                while await self._probe(address) or address in self._members.chosen:
                    if self._members.is_left_to_others(address):
                        break
                    await asyncio.sleep(PROBE_SECONDS if address in self._alive else PROBE_SECONDS / 5)
            finally:
                self._alive.discard(address)
                del self._stubs[address]
                self._fall_backs.end("other_tokenizer", address)
                self._forgive(address)
            await asyncio.sleep(LEAVE_SECONDS)

    async def _probe(self, address: str) -> bool:
        """Return whether the replica answers."""
        try:
            info: tokenizer_pb2.GetTokenizerInfoResponse = await self._stubs[address].GetTokenizerInfo(
                tokenizer_pb2.GetTokenizerInfoRequest(), timeout=ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            if address in self._alive:
                log.warning("tokenizer %s: %s", address, error.code().name)
            self._alive.discard(address)
            self._forgive(address)
            return False
        self._learn(address, info)
        return True

    def _learn(self, address: str, info: tokenizer_pb2.GetTokenizerInfoResponse) -> None:
        # The first replica decides what is served: a rolling update must not mix the ids of two tokenizers in one
        # prefix cache.
        if self.info is None:
            self.info = info
            self._known.set()
        difference = fingerprint_difference(self.info.fingerprint, info.fingerprint)
        if difference is None:
            if address not in self._alive:
                self._alive.add(address)
                came, self._came = self._came, asyncio.Event()
                came.set()
            self._fall_backs.end("other_tokenizer", address)
        else:
            self._alive.discard(address)
            self._fall_backs.begin("other_tokenizer", f"it differs from the first one: {difference}", address)


class CallRetries:
    """Says when a call that no replica has answered may ask another one, and what ends it."""

    def __init__(self, budget: RetryBudget) -> None:
        self._debt = RetryDebt(budget)
        self._delay = FIRST_DELAY_SECONDS
        self._num_lost = 0  # in this round
        self._has_ended_one = False  # whether one that was lost in this round may have ended, because of the text
        self._num_lost_rounds = 0
        self._num_wrong = 0

    def failed(self, failure: grpc.aio.AioRpcError | None, is_back: Callable[[], bool] | None = None) -> None:
        """Note how a replica failed the call; None: its answer was wrong. ``is_back``: returns whether it answers
        again. Raises the error that another replica would answer with, too, and ``Internal`` for a text that no replica
        answers rightly."""
        silence = failure is not None and was_silent(failure)
        self._debt.failed(Cause.SILENT, is_back=is_back if silence else None)
        if failure is None:
            self._num_wrong += 1
            # If there is no other replica than this one, one may be starting again.
            self._delay = MAX_DELAY_SECONDS
            if self._num_wrong == MAX_WRONG:
                raise errors.Internal("Tokenizers gave invalid answers again and again.")
            return
        if wire_errors.code_of(failure) not in _LOST:
            raise wire_errors.from_rpc(failure) from failure
        self._num_lost += (was_lost := wire_errors.was_cut(failure))
        # On a busy machine, or over a link that loses packets, pings are late although the process lives.
        self._has_ended_one |= was_lost and not silence

    def lost(self) -> None:
        """Note that a replica has left with the call."""
        self._debt.failed(Cause.SILENT)
        self._num_lost += 1
        self._has_ended_one = True

    def may_ask(self) -> bool:
        """Return whether another replica may be asked in this round."""
        return self._num_lost < LOST_IN_A_ROUND and self._debt.pay()

    async def pause(self, came: asyncio.Event) -> None:
        """Wait until ``came`` is set, because another replica answers, or the next round is due. Raises ``Internal``
        for a text with which replicas are lost again and again."""
        self._num_lost_rounds += self._has_ended_one
        if self._num_lost_rounds == MAX_LOST_ROUNDS:
            raise errors.Internal("Tokenizers were lost again and again while they had the text.")
        self._num_lost, self._has_ended_one = 0, False
        try:
            async with asyncio.timeout(self._delay):
                await came.wait()
        except TimeoutError:
            self._delay = min(2 * self._delay, MAX_DELAY_SECONDS)


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """Run the ``async with`` block for at most so long. Raises :class:`errors.DeadlineExceeded` otherwise."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the request took longer than {seconds:g} s") from None
