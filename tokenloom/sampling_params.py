"""Sampling parameters of the offline API, with vLLM's names and defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tokenloom.services.runtime import validation
from tokenloom.services.runtime.errors import InvalidArgument, TokenloomError
from tokenloom.v1 import types_pb2

_ANY_MODEL = types_pb2.ModelLimits(max_model_len=2**32 - 1, vocab_size=2**32 - 1)
_NOT_SAMPLING = (
    "n",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
)


@dataclass(kw_only=True)
class SamplingParams:
    """How a prompt is continued. A wrong value raises ``ValueError`` that names it."""

    n: int = 1
    """Outputs for each prompt; more than one is not supported yet."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    seed: int | None = None
    """None: drawn from the seed of the :class:`~tokenloom.LLM`."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    """Strings that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Goes on past the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    """None: what is left of the context."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    """Without it outputs have token ids and no text."""
    min_tokens: int = 0
    """Not supported yet, like all that follow."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        try:
            validation.check_sampling(self.to_wire(), _ANY_MODEL)
            validation.check_stop(self.stop_strings())
        except TokenloomError as error:
            raise ValueError(error.message) from None

    def to_wire(self) -> types_pb2.SamplingParams:
        """As the services exchange them, so that one validator judges both. Raises ``InvalidArgument``."""
        if type(self.n) is not int or self.n < 1:
            raise InvalidArgument(f"n must be an integer of at least 1, not {self.n!r}", "n")
        if self.n > 1:
            raise InvalidArgument("n above 1 is not supported yet", "n")
        names = (field.name for field in fields(self) if field.name not in _NOT_SAMPLING)
        return validation.narrow_sampling({name: getattr(self, name) for name in names})

    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a sequence. Raises ``InvalidArgument``."""
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(string, str) for string in strings):
            raise InvalidArgument("stop must be a string or a list of strings", "stop")
        if strings and not self.detokenize:
            raise InvalidArgument("stop needs detokenize: stop strings are found in the text", "stop")
        return strings
