"""Turns prompts and sampling parameters of the offline API into checked requests of the engine core."""

import itertools
import logging
import random
from collections.abc import Container, Sequence

from msgspec.structs import replace
from tokenizers import Tokenizer

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import MediaSpan
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.request import validation
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.request.errors import TokenloomError
from tokenloom.request.narrowing import narrow_int
from tokenloom.request.output_constraints import forbid_words, relax, word_spellings
from tokenloom.request.prompt_embeds import check_embeds
from tokenloom.request.reasoning import Reasoning, ReasoningMarks
from tokenloom.request.sampling_params import sample_seed
from tokenloom.services.engine.records.core_request import check_generates, to_core_sampling, to_media, to_spans
from tokenloom.services.output_processor.text.detokenizer import Detokenizer, OutputText
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1 import types_pb2

from .offline_request import OfflineRequest, OfflineSample, TextSettings
from .prompts import TokenizedPrompt
from .sampling_params import SamplingParams

log = logging.getLogger(__name__)


class RequestBuilder:
    """Builds requests. Raises ``InvalidArgument`` or ``ValueError`` naming what is wrong."""

    def __init__(
        self,
        info: CheckpointInfo,
        tokenizer: Tokenizer,
        limits: types_pb2.ModelLimits,
        seed: int | None,
        reasoning_marks: ReasoningMarks | None = None,
    ) -> None:
        """``seed`` decides the outputs of requests that set no seed. ``reasoning_marks``: around the model's reasoning;
        None: they are not known."""
        self._reasoning_marks = reasoning_marks
        self._info = info
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self.limits = limits
        self._random = random.Random(seed)
        self._request_ids = map(str, itertools.count())

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an output, without those of the tokenizer that the model cannot generate."""
        return [token_id for token_id in self._info.eos_token_ids if token_id < self.limits.vocab_size]

    def default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's ``generation_config.json``, and ours for the rest."""
        stated = self._info.default_sampling_params.ListFields()
        return SamplingParams(**{field.name: value for field, value in stated})

    def build(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        *,
        refuses_alone: bool = False,
    ) -> list[OfflineRequest]:
        """Return a request for each prompt.

        Args:
            params: One for all, one for each, or None for the model's own.
            priority: One for all, one for each, or None for 0.
            refuses_alone: Of several prompts, one that is refused becomes a request that has ended with the error, so
                that the others run.
        """
        if params is None:
            each = [self._defaults_for(prompt) for prompt in prompts]
        elif isinstance(params, SamplingParams):
            each = [params] * len(prompts)
        else:
            each = list(params)
        priorities = [priority or 0] * len(prompts) if isinstance(priority, int | None) else list(priority)
        for name, values in (("sampling_params", each), ("priority", priorities)):
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} entries for {len(prompts)} prompts")
        make = self._request_or_refusal if refuses_alone and len(prompts) > 1 else self._request
        return list(map(make, prompts, each, priorities))

    def _defaults_for(self, prompt: TokenizedPrompt) -> SamplingParams:
        """Return the model's own parameters, with at most as many tokens as the prompt leaves room for."""
        params = self.default_sampling_params()
        rest = max(self.limits.max_model_len - len(prompt.token_ids), 1)
        return replace(params, max_tokens=rest if params.max_tokens is None else min(params.max_tokens, rest))

    def _request_or_refusal(self, prompt: TokenizedPrompt, params: SamplingParams, priority: int) -> OfflineRequest:
        try:
            return self._request(prompt, params, priority)
        except (TokenloomError, ValueError) as error:
            request_id = next(self._request_ids)
            core_request = EngineCoreRequest(request_id, prompt.token_ids, CoreSamplingParams(max_tokens=1, seed=0))
            settings = self._text_settings(prompt, params, ())
            samples = [OfflineSample(core_request, index, settings) for index in range(params.n)]
            refused = OfflineRequest(request_id, prompt.text, samples, output_kind=params.output_kind)
            refused.abort(ValueError(error.message) if isinstance(error, TokenloomError) else error)
            return refused

    def _request(self, prompt: TokenizedPrompt, params: SamplingParams, priority: int) -> OfflineRequest:
        if prompt.error is not None:
            raise prompt.error
        check_generates(self.limits)
        validation.check_priority(narrow_int("priority", priority, -(2**31), 2**31 - 1), self.limits)
        wire = params.to_wire()
        if wire.HasField("structured_outputs") and (lost := relax(wire.structured_outputs)):
            log.warning("no grammar expresses %s; the output may break it", ", ".join(lost))
        spellings = word_spellings(params.bad_words or ())
        forbid_words(wire, [self._encode(text) for text in spellings])
        eos = () if params.ignore_eos else self.eos_token_ids
        wire.stop_token_ids.extend(token_id for token_id in eos if token_id not in wire.stop_token_ids)
        if not wire.HasField("seed"):
            wire.seed = self._random.getrandbits(64)
        validation.check_generate(prompt.token_ids, wire, self.limits, stop=params.stop_strings())
        if prompt.embeds:
            check_embeds(types_pb2.Prompt(token_ids=prompt.token_ids, embeds=prompt.embeds), wire, self.limits)
        media: list[MediaSpan] = []
        if prompt.media is not None:
            media = to_media(types_pb2.Prompt(token_ids=prompt.token_ids, media=prompt.media.items), self.limits)
        request_id, stops = next(self._request_ids), frozenset(wire.stop_token_ids)
        return OfflineRequest(
            request_id,
            prompt.text,
            [
                OfflineSample(core_request, index, self._text_settings(prompt, params, stops))
                for index, core_request in enumerate(self._samples(request_id, prompt, wire, params.n, priority, media))
            ],
            output_kind=params.output_kind,
            stream_interval=params.stream_interval,
            media=prompt.media,
        )

    def _samples(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        wire: types_pb2.SamplingParams,
        n: int,
        priority: int,
        media: list[MediaSpan],
    ) -> list[EngineCoreRequest]:
        """Return n requests with different seeds; only the first returns the prompt's log probabilities and experts."""
        rest = self.limits.max_model_len - len(prompt.token_ids)
        first = to_core_sampling(wire, self.limits, rest, self._random)
        others = replace(first, prompt_logprobs=None)
        if first.return_routed_experts:
            start = max(first.routed_experts_prompt_start, len(prompt.token_ids))
            others = replace(others, routed_experts_prompt_start=start)
        return [
            EngineCoreRequest(
                request_id=request_id if n == 1 else f"{index}_{request_id}",
                prompt_token_ids=prompt.token_ids,
                sampling_params=replace(others if index else first, seed=sample_seed(first.seed, index)),
                priority=priority,
                cache_salt=adapter_salt(prompt.cache_salt, prompt.adapter),
                prompt_embeds=to_spans(prompt.embeds),
                adapter=prompt.adapter,
                reasoning_start=prompt.reasoning_start,
                media=media,
            )
            for index in range(n)
        ]

    def _text_settings(
        self, prompt: TokenizedPrompt, params: SamplingParams, stop_token_ids: Container[int]
    ) -> TextSettings:
        detokenizer = Detokenizer(
            self._vocabulary,
            prompt.token_ids,
            stop=params.stop_strings(),
            min_tokens=params.min_tokens,
            include_stop_str=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens,
            detokenize=params.detokenize,
        )
        text = OutputText(detokenizer, stop_token_ids, self._info.eos_token_ids)
        reasoning, is_bound_later = None, False
        if self._reasoning_marks is not None:
            reasoning = Reasoning(self._reasoning_marks, prompt.token_ids, prompt.reasoning_start)
            is_free = self.limits.reasoning == types_pb2.REASONING_MODE_FREE and not reasoning.is_over
            is_bound_later = params.structured_outputs is not None and is_free
        return TextSettings(text, self._vocabulary if params.detokenize else None, reasoning, is_bound_later)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
