"""Sampling parameters of the offline API, with vLLM's names and defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenloom.request import bad_words, validation
from tokenloom.request.errors import InvalidArgument, TokenloomError
from tokenloom.v1 import output_processor_pb2, types_pb2

from .outputs import RequestOutputKind
from .structured_outputs import StructuredOutputsParams

_ANY_MODEL = types_pb2.ModelLimits(max_model_len=2**32 - 1, vocab_size=2**32 - 1, max_logprobs=2**32 - 1)
_NOT_SAMPLING = (
    "n",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "output_kind",
    "stream_interval",
    "bad_words",  # texts: their tokens are the model's business
    "repetition_detection",
    "structured_outputs",
)


@dataclass(kw_only=True)
class RepetitionDetectionParams:
    """An output that ends with one pattern of tokens, repeated so often, is cut."""

    max_pattern_size: int = 0
    """Tokens in the longest pattern looked for; 0 is off."""
    min_pattern_size: int = 0
    """In the shortest; 0 is 1."""
    min_count: int = 0
    """At least 2."""


@dataclass(kw_only=True)
class SamplingParams:
    """How a prompt is continued. A wrong value raises ``ValueError`` that names it."""

    n: int = 1
    """Outputs for each prompt."""
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
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    """Without it outputs have token ids and no text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What the outputs of ``LLM.stream`` hold; those of ``generate`` and ``chat`` are final."""
    stream_interval: int = 1
    """Tokens between two outputs of ``LLM.stream``, but for the first and the last."""
    min_tokens: int = 0
    """Tokens before which no stop token may come."""
    logprobs: int | None = None
    """How many of the best tokens to tell beside each token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    logprob_token_ids: Sequence[int] | None = None
    """With ``logprobs``: tokens to tell whatever their rank."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to a token's logit, from -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Nothing else is drawn."""
    bad_words: Sequence[str] | None = None
    """Words that do not appear in the output."""
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_reading_prefix_cache: bool | None = None
    """Computes the whole prompt, whatever is cached of it."""
    thinking_token_budget: int | None = None
    """Not supported yet, like the next."""
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            self._check_outputs()
            validation.check_sampling(self.to_wire(), _ANY_MODEL, self.n)
            text = output_processor_pb2.TextOptions(stop=self.stop_strings(), detokenize=self.detokenize)
            validation.check_text(text)
            bad_words.spellings(self.bad_words or ())
        except TokenloomError as error:
            raise ValueError(error.message) from None

    def to_wire(self) -> types_pb2.SamplingParams:
        """As the services exchange them, so that one validator judges both; without ``bad_words``, which are texts.

        Raises ``InvalidArgument``.
        """
        names = (field.name for field in fields(self) if field.name not in _NOT_SAMPLING)
        values = {name: getattr(self, name) for name in names}
        if self.repetition_detection is not None:
            values["repetition_detection"] = asdict(self.repetition_detection)
        wire = validation.narrow_sampling(values)
        if self.structured_outputs is not None:
            wire.structured_outputs.CopyFrom(self.structured_outputs.to_wire())
        return wire

    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a sequence. Raises ``InvalidArgument``."""
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(string, str) for string in strings):
            raise InvalidArgument("stop must be a string or a list of strings", "stop")
        return strings

    def _check_outputs(self) -> None:
        """What is no sampling parameter to the services."""
        self.n = validation.narrow_int("n", self.n, 1, validation.MAX_SAMPLES)
        self.stream_interval = validation.narrow_int("stream_interval", self.stream_interval, 1, 2**32 - 1)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidArgument(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", "output_kind")
        words = self.bad_words or ()
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise InvalidArgument("bad_words must be a list of strings", "bad_words")
