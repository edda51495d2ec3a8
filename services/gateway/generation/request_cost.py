"""Bounds how much one request may ask for: the tokens of all its outputs, each with its log probabilities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import output_processor_pb2, types_pb2

Submits = Iterable[output_processor_pb2.Submit]

MAX_PARAMETER_BYTES = 32 << 20
"""Limits the sampling parameters of all prompts of a request together: each prompt is sent with its own copy."""


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

    def check(self, submits: Submits, limits: types_pb2.ModelLimits) -> None:
        """Raise ``InvalidArgument`` for outputs and prompts that have more values."""
        max_tokens = 0
        num_prompt_values = 0
        for submit in submits:
            params = submit.sampling_params
            max_tokens = max(max_tokens, params.max_tokens)
            if params.HasField("prompt_logprobs"):
                num_prompt_values += len(submit.prompt.token_ids) * min(params.prompt_logprobs, limits.vocab_size)
        if num_prompt_values > self.most:
            raise InvalidArgument(
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
            raise InvalidArgument(
                f"{' * '.join(factors)} is {' * '.join(map(str, factors.values()))} = {product}; this gateway allows "
                f"{self.most} in a request (--max-request-values): lower {' or '.join(names)}",
                "n" if self.num_samples > 1 else "max_tokens",
            )


def check_copies(sampling: types_pb2.SamplingParams, prompts: Sequence[object]) -> None:
    """Raise ``InvalidArgument`` for sampling parameters that are too large to be sent with each of several prompts."""
    num_bytes = sampling.ByteSize() * len(prompts) if len(prompts) > 1 else 0
    if num_bytes > MAX_PARAMETER_BYTES:
        raise InvalidArgument(
            f"the sampling parameters take {num_bytes} bytes for {len(prompts)} prompts; at most {MAX_PARAMETER_BYTES} "
            "are allowed: send fewer prompts, or fewer ids in allowed_token_ids and logit_bias",
            "prompt",
        )
