"""Admits requests, within the limits of the gateway and of their tenants."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Self

from tokenloom.request import errors, validation
from tokenloom.v1 import output_processor_pb2

from ..tenants.tenant_share import TenantShare
from ..tenants.tenant_shares import TenantShares
from .job import Chat, Job

MAX_PROMPTS = 1024
"""Limit on the prompts of one request."""


class Admission:
    """Admits requests until the gateway drains."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_places = 0
        self._num_old: int | None = None
        self._old_ended = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Outputs in work."""
        return self._shares.outputs.taken

    def admit(self, job: Job) -> "Place":
        """Return the request's place, which holds its part of the tenant's share until it is closed.

        Raises ``Unavailable`` while the gateway drains, ``ResourceExhausted`` when the gateway is full,
        ``RateLimitExceeded`` when the tenant is at a limit, ``InvalidArgument`` for too many prompts or samples.
        """
        num_outputs = _num_outputs(job)
        if self._draining:
            raise errors.Unavailable("the gateway is shutting down; retry")
        share = self._shares.of(job.tenant)
        share.add_outputs(num_outputs, self._shares.outputs)
        place = Place(self, share, num_outputs, is_new=self._num_old is not None)
        self._num_places += 1
        try:
            place.add_grammar(job)
        except errors.TokenloomError:
            place.close()
            raise
        self._idle.clear()
        return place

    async def drain(self) -> None:
        """Refuse new requests, and return when none is in work."""
        self._draining = True
        await self._idle.wait()

    async def end_of_present(self) -> None:
        """Return when the requests that are in work now have ended; new ones are still admitted. To be called once."""
        self._num_old = self._num_places
        if self._num_old:
            await self._old_ended.wait()

    def leave(self, share: TenantShare, num_outputs: int, *, is_new: bool) -> None:
        """Subtract the outputs of a request that has ended. ``is_new``: it came after :meth:`end_of_present`."""
        self._num_places -= 1
        if self._num_old and not is_new:
            self._num_old -= 1
            if not self._num_old:
                self._old_ended.set()
        share.remove_outputs(num_outputs, self._shares.outputs)
        if not self.num_live:
            self._idle.set()


class Place:
    """Holds what one request has of its tenant's share, until it is closed.

    Attributes:
        num_output_tokens: Tokens that were computed for the outputs; set before the place is closed.
    """

    def __init__(self, admission: Admission, share: TenantShare, num_outputs: int, *, is_new: bool = False) -> None:
        self.num_output_tokens = 0
        self._is_new = is_new
        self._admission = admission
        self._share = share
        self._num_outputs = num_outputs
        self._num_prompt_tokens = self._reserved = 0
        self._grammar = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def add_grammar(self, job: Job) -> None:
        """Count the request's grammar, if it has one, until :meth:`begin_output`. Raises ``RateLimitExceeded``."""
        if job.sampling.HasField("structured_outputs"):
            text = job.sampling.structured_outputs.SerializeToString(deterministic=True)
            grammar = hashlib.blake2b(text, digest_size=16).digest()
            self._share.add_grammar(grammar)
            self._grammar = grammar

    def reserve_tokens(self, submits: Sequence[output_processor_pb2.Submit], *, is_bounded: bool) -> None:
        """Reserve the tokens that the prompts and their outputs may use, before any of them is sent.

        ``is_bounded``: the client has set the limit of the outputs. Raises as :meth:`TenantShare.reserve_tokens`.
        """
        num_prompt = num_output = 0
        for submit in submits:
            num_prompt += len(submit.prompt.token_ids)
            num_output += (submit.num_samples or 1) * submit.sampling_params.max_tokens
        self._reserved = self._share.reserve_tokens(num_prompt, num_output, is_bounded=is_bounded)
        self._num_prompt_tokens = num_prompt

    def begin_output(self) -> None:
        """Take note of the first token: the grammar has been compiled."""
        if self._grammar:
            self._share.remove_grammar(self._grammar)
            self._grammar = b""

    def close(self) -> None:
        """Return what the request holds, and charge the tokens that it used."""
        self.begin_output()
        if self._num_prompt_tokens:
            self._share.charge(self._reserved, self._num_prompt_tokens + self.num_output_tokens)
        self._admission.leave(self._share, self._num_outputs, is_new=self._is_new)


def _num_outputs(job: Job) -> int:
    """Return the number of outputs. Checked before anything is allocated for them."""
    num_prompts = 1 if isinstance(job.prompts, Chat) else len(job.prompts)
    if num_prompts > MAX_PROMPTS:
        field = job.prompt_field
        raise errors.InvalidArgument(f"{field} may hold at most {MAX_PROMPTS} prompts, not {num_prompts}", field)
    validation.check_samples(job.num_samples, num_prompts)
    return num_prompts * job.num_samples
