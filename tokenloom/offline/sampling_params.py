"""Defines the sampling parameters of the offline API, with vLLM's names and defaults."""

from typing import Annotated

from msgspec import Meta

from tokenloom.request import validation
from tokenloom.request.errors import InvalidArgument, TokenloomError
from tokenloom.request.narrowing import SAMPLING_NAMES, narrow, narrow_sampling
from tokenloom.request.output_constraints import word_spellings
from tokenloom.request.sampling_params import GenerationFields
from tokenloom.v1 import output_processor_pb2, types_pb2

from .outputs import RequestOutputKind


class SamplingParams(GenerationFields, kw_only=True):
    """How prompts are continued. A wrong value raises ``ValueError`` that names it."""

    output_kind: Annotated[RequestOutputKind, Meta(description="What the outputs of LLM.stream hold.")] = (
        RequestOutputKind.CUMULATIVE
    )

    def __post_init__(self) -> None:
        try:
            self._check_outputs()
            validation.check_sampling(self.to_wire(), validation.ANY_MODEL, self.n)
            text = output_processor_pb2.TextOptions(stop=self.stop_strings(), detokenize=self.detokenize)
            validation.check_text(text)
            word_spellings(narrow("bad_words", self.bad_words or ()))
        except TokenloomError as error:
            raise ValueError(error.message) from None

    def to_wire(self) -> types_pb2.SamplingParams:
        """Return the parameters as the services exchange them, without ``bad_words``, which are texts here.

        Raises ``InvalidArgument``.
        """
        return narrow_sampling({name: getattr(self, name) for name in SAMPLING_NAMES})

    def stop_strings(self) -> list[str]:
        """Return ``stop`` as a list. Raises ``InvalidArgument``."""
        strings: list[str] = narrow("stop", () if self.stop is None else self.stop)
        return strings

    def _check_outputs(self) -> None:
        """Check what is no sampling parameter to the services."""
        self.n, self.stream_interval = narrow("n", self.n), narrow("stream_interval", self.stream_interval)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidArgument(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", "output_kind")
