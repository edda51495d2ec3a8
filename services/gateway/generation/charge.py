"""Estimates and bounds what a request may cost, and counts what its tenant owes for it: each of its tokens once,
whichever calls and attempts brought it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenloom.request import errors
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..metrics.usage_counts import Used
from ..records.generate_request import Chat, EmbeddedPrompt, GenerateRequest
from ..records.request_ids import ResumeToken

KEPT_SECONDS: Final = 60.0
"""For so long output processors keep an answer that has ended (``--keep-lost-requests``). A later call with the same
key begins a new request, which is charged as one."""
MAX_CHARGES: Final = 65_536
"""Complete requests whose charge is remembered: as many as end in that time at 1,000 requests per second. One takes
about 300 bytes."""
BYTES_PER_TOKEN: Final = 4
"""A usual length of a token. A text is counted by its bytes until it has been encoded."""
_EMBEDDING_BYTES: Final = 4096
"""Bytes of a prompt embedding per token, for the same purpose."""
MAX_PARAMETER_BYTES = 32 << 20
"""Limits the sampling parameters of all prompts of a request together: each prompt is sent with its own copy."""


class Charge:
    """Knows up to which position the outputs of a request were counted.

    Every call that resumes or repeats a request gets its output again from the beginning, so the highest position of
    all of them is what was computed.

    Attributes:
        num_calls: Calls of the request that have not ended.
    """

    __slots__ = ("_counted", "_elsewhere", "_has_prompt", "_num_cached", "_prompt_is_elsewhere", "num_calls")

    def __init__(self, elsewhere: Sequence[int] = (), *, has_prompt: bool = False) -> None:
        """``elsewhere``: tokens of each output that were counted elsewhere. ``has_prompt``: so was the prompt."""
        self.num_calls = 0
        self._elsewhere = list(elsewhere)
        self._counted = list(elsewhere)
        self._has_prompt = self._prompt_is_elsewhere = has_prompt
        self._num_cached = 0

    def trust(self, token: ResumeToken) -> None:
        """Believe of what was counted elsewhere only as much as the client of every call says it has: a client that
        names a position it never had must not get what is before it for nothing."""
        for index, elsewhere in enumerate(self._elsewhere):
            has = token.num_delivered[index] if index < len(token.num_delivered) else 0
            if has < elsewhere:
                self._counted[index] -= elsewhere - has
                self._elsewhere[index] = has
        if self._prompt_is_elsewhere and not token.resumes:
            self._has_prompt = self._prompt_is_elsewhere = False

    def add(self, num_prompt: int, num_cached: int, positions: Sequence[int]) -> Used:
        """Count what a call has got, and return the part of it that was not counted before. ``positions``: tokens of
        each output."""
        counted = self._counted
        counted += [0] * (len(positions) - len(counted))
        num_new = 0
        for index, position in enumerate(positions):
            # By position, and not by what each call was sent: with three resumptions an answer of 66 tokens was charged
            # as 181.
            if position > counted[index]:
                num_new += position - counted[index]
                counted[index] = position
        is_new, self._has_prompt = not self._has_prompt, True
        num_newly_cached = max(num_cached - self._num_cached, 0)  # known at the end of an output only
        self._num_cached += num_newly_cached
        return Used(int(is_new), num_prompt if is_new else 0, num_newly_cached, num_new)


class Charges:
    """Remembers the charges of requests that can be resumed, or repeated by a key, as long as a further call gets the
    same output: while calls run, and for a while after a complete answer."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_CHARGES) -> None:
        """``clock``: seconds. ``most``: complete requests that are remembered; the one that was complete first is
        forgotten first."""
        self._clock = clock
        self._most = most
        self._by_id: dict[tuple[str, str], Charge] = {}  # bounded by what is admitted, and by `most`
        self._complete: dict[tuple[str, str], float] = {}  # those that can be repeated, with the end of that, ascending

    def of(self, tenant: str, request_id: str, token: ResumeToken) -> Charge:
        """Return the charge of a request for a call, which must :meth:`leave` at its end.

        A request that is resumed, and that this gateway does not know, was begun through another one, which has counted
        the prompt and what the client has of the output.
        """
        self._forget_old()
        key = tenant, request_id
        if (charge := self._by_id.get(key)) is None:
            charge = self._by_id[key] = Charge(token.num_delivered, has_prompt=token.resumes)
        charge.trust(token)
        charge.num_calls += 1
        return charge

    def leave(self, tenant: str, request_id: str, charge: Charge, *, is_complete: bool) -> None:
        """End a call. ``is_complete``: it got the whole answer, which output processors keep for a while. Any other one
        they have forgotten if no other call has it: it is computed again for who asks for it."""
        key = tenant, request_id
        if self._by_id.get(key) is not charge:
            return
        charge.num_calls -= 1
        if is_complete:
            self._complete.setdefault(key, self._clock() + KEPT_SECONDS)  # a repeat does not prolong it
            self._forget_old()
        # Kept no longer than output processors keep the answer. While it stayed until 65,536 others displaced it, a
        # tenant that used one key again and again paid for its first answer only.
        elif not charge.num_calls and key not in self._complete:
            del self._by_id[key]

    def forget(self, tenant: str, request_id: str) -> None:
        """Forget a request that its client has cancelled. A call with its key begins it anew."""
        self._by_id.pop((tenant, request_id), None)
        self._complete.pop((tenant, request_id), None)

    def _forget_old(self) -> None:
        """Forget the requests that cannot be repeated any more, and the oldest ones beyond the limit."""
        now = self._clock()
        while self._complete:
            oldest = next(iter(self._complete))
            if self._complete[oldest] > now and len(self._complete) <= self._most:
                return
            del self._complete[oldest]
            del self._by_id[oldest]


def estimate_prompt_tokens(request: GenerateRequest) -> int:
    """Return roughly how many tokens the prompts have, without encoding them."""
    if isinstance(request.prompts, Chat):
        return (len(request.prompts.messages_json) + len(request.prompts.tools_json)) // BYTES_PER_TOKEN
    return len(request.before) + sum(map(_estimate, request.prompts))


def _estimate(prompt: str | Sequence[object] | EmbeddedPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, EmbeddedPrompt):
        return sum(len(part) // _EMBEDDING_BYTES if isinstance(part, bytes) else len(part) for part in prompt.parts)
    return len(prompt)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Knows the factors of a request's cost, ``n * max_tokens * (1 + logprobs)``, and its limit.

    A value is a token or one of the alternatives that are returned with it. A client may send several prompts: then
    each counts.
    """

    num_prompts: int
    num_samples: int
    num_alternatives: int
    """Log probabilities to return with each token, in addition to its own."""
    most: int
    """The values that a request may have."""

    @classmethod
    def of(
        cls, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, outputs: tuple[int, int], most: int
    ) -> "RequestCost":
        """``outputs``: the number of prompts, and of samples of each."""
        named = min(sampling.logprobs, limits.vocab_size) if sampling.HasField("logprobs") else 0
        return cls(*outputs, named + len(sampling.logprob_token_ids), most)

    @property
    def default_tokens(self) -> int:
        """The most tokens of an output whose length the client leaves open."""
        return max(self.most // (self.num_prompts * self.num_samples * (1 + self.num_alternatives)), 1)

    def check(self, submits: Iterable[output_processor_pb2.Submit], limits: types_pb2.ModelLimits) -> None:
        """Raise ``InvalidArgument`` for outputs and prompts that have more values."""
        max_tokens = 0
        num_prompt_values = 0
        for submit in submits:
            params = submit.sampling_params
            max_tokens = max(max_tokens, params.max_tokens)
            if params.HasField("prompt_logprobs"):
                num_prompt_values += len(submit.prompt.token_ids) * min(params.prompt_logprobs, limits.vocab_size)
        if num_prompt_values > self.most:
            raise errors.InvalidArgument(
                f"prompt_logprobs asks for {num_prompt_values} log probabilities of the prompts; this gateway allows "
                f"{self.most} in a request (--max-request-values): lower prompt_logprobs, or send fewer or shorter "
                "prompts",
                "prompt_logprobs",
            )
        factors = {"n": self.num_samples, "max_tokens": max_tokens, "(1 + logprobs)": 1 + self.num_alternatives}
        if self.num_prompts > 1:
            factors = {"prompts": self.num_prompts} | factors
        product = self.num_prompts * self.num_samples * max_tokens * (1 + self.num_alternatives)
        if product > self.most:
            names = [name.removeprefix("(1 + ").rstrip(")") for name, factor in factors.items() if factor > 1]
            raise errors.InvalidArgument(
                f"{' * '.join(factors)} is {' * '.join(map(str, factors.values()))} = {product}; this gateway allows "
                f"{self.most} in a request (--max-request-values): lower {' or '.join(names)}",
                "n" if self.num_samples > 1 else "max_tokens",
            )


def check_copies(sampling: types_pb2.SamplingParams, num_prompts: int) -> None:
    """Raise ``InvalidArgument`` for sampling parameters that are too large to be sent with each of several prompts."""
    num_bytes = sampling.ByteSize() * num_prompts
    if num_bytes > MAX_PARAMETER_BYTES:
        raise errors.InvalidArgument(
            f"the sampling parameters take {num_bytes} bytes for {num_prompts} prompts; at most {MAX_PARAMETER_BYTES} "
            "are allowed: send fewer prompts, or fewer ids in allowed_token_ids and logit_bias",
            "prompt",
        )
