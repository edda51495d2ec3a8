"""Follows one prompt of the offline API and its samples from the first step to the last."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs
from tokenloom.request.reasoning import Reasoning
from tokenloom.request.routed_rows import RoutedRows, to_array
from tokenloom.services.output_processor.text.detokenizer import OutputText, StopMatch
from tokenloom.services.output_processor.text.vocabulary import Vocabulary

from .media import PromptMedia
from .outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind


class CoreRefusal(Exception):
    """The core has ended a request with an error, which is the request's own."""

    def __init__(self, error: ValueError | RuntimeError) -> None:
        """``error``: ``ValueError`` if the request was at fault, ``RuntimeError`` if the core failed it."""
        super().__init__(str(error))
        self.error = error


def check_step(step: EngineCoreOutput) -> None:
    """Raise `CoreRefusal` if a step's result ends its request with an error."""
    if step.error_field:
        raise CoreRefusal(ValueError(step.error))
    if step.error or step.finish_reason is FinishReason.ERROR:
        raise CoreRefusal(RuntimeError(f"request {step.request_id} failed: {step.error}"))


_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REPETITION: "repetition",
}


@dataclass(frozen=True)
class TextSettings:
    """Holds what turns tokens into text."""

    text: OutputText
    vocabulary: Vocabulary | None
    """Decodes the tokens of log probabilities; None: the caller wants no text."""
    reasoning: Reasoning | None = None
    """Counts reasoning tokens; None: the marks around the model's reasoning are not known."""
    is_bound_later: bool = False
    """Whether a constraint begins where the reasoning ends."""


class OfflineSample:
    """Collects one continuation's tokens, text and log probabilities in its ``completion``."""

    def __init__(self, core_request: EngineCoreRequest, index: int, settings: TextSettings) -> None:
        self.core_request = core_request
        self._settings = settings
        self._text = text = settings.text
        params = core_request.sampling_params
        self._num_also = len(params.logprob_token_ids or ())
        self.completion = CompletionOutput(index=index, text="", token_ids=text.token_ids)
        if params.logprobs is not None:
            self.completion.logprobs, self.completion.cumulative_logprob = [], 0.0
        if settings.reasoning is not None:
            self.completion.num_reasoning_tokens = 0
        self._routed = RoutedRows(params.routed_experts_prompt_start) if params.return_routed_experts else None
        self._num_reported_chars = self._num_reported_tokens = 0
        details = (self.completion.logprobs, settings.reasoning, self._routed)
        self._is_plain = not text.may_stop and all(each is None for each in details)
        """Whether the text may be made when it is asked for: decoding it step by step takes longer."""
        self._unread: list[int] = []  # tokens of such an output whose text is not made yet

    @property
    def num_tokens(self) -> int:
        """Return the number of its tokens."""
        return len(self.completion.token_ids) + len(self._unread)

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens since the last :meth:`news`."""
        return self.num_tokens - self._num_reported_tokens

    @property
    def is_new(self) -> bool:
        """Return whether :meth:`news` has not been called yet."""
        return not self._num_reported_tokens

    def accept(self, step: EngineCoreOutput) -> bool:
        """Add a step's result. Returns whether a stop string ended the output, which the core does not know.

        Raises `CoreRefusal`.
        """
        if self._is_plain and step.finish_reason is None:
            self._unread += step.new_token_ids
            return False
        check_step(step)
        completion = self.completion
        num_before = len(completion.token_ids)
        match = self._read(step.new_token_ids)
        if (reasoning := self._settings.reasoning) is not None:
            reasoning.feed(completion.token_ids[num_before:])
            completion.num_reasoning_tokens = reasoning.num_tokens
        if step.routed_experts is not None and self._routed is not None:
            self._routed.add(step.routed_experts)
        if step.new_logprobs is not None:
            self._weigh(step.new_logprobs, len(step.new_token_ids))
        if match is not None:
            completion.finish_reason, completion.stop_reason = "stop", match.stop_string
            self._set_routed()
            return True
        if step.finish_reason is not None:
            self._finish(step.finish_reason, step.stop_token_id)
        return False

    def abort(self, reason: str) -> None:
        """End the output, unless it has ended, with what it has."""
        if not self.completion.finished():
            self._read(())
            self.completion.finish_reason = reason

    def _read(self, new: Sequence[int]) -> StopMatch | None:
        """Make the text of new tokens, and of those before them that have none yet."""
        if self._unread:
            new, self._unread = [*self._unread, *new], []
        text, match = self._text.add(new)
        self.completion.text += text
        return match

    def prompt_logprobs(self, columns: Logprobs) -> list[dict[int, Logprob] | None]:
        """Return the log probabilities of the prompt; ``columns`` has all its tokens except the first."""
        prompt = self.core_request.prompt_token_ids
        return [None, *token_logprobs(columns, prompt[1:], 0, self._settings.vocabulary)]

    def news(self, *, whole: bool) -> CompletionOutput:
        """Return a copy of the whole output so far, or of what is new since the last call."""
        full = self.completion
        if self._unread:
            self._read(())
        chars, tokens = (0, 0) if whole else (self._num_reported_chars, self._num_reported_tokens)
        self._num_reported_chars, self._num_reported_tokens = len(full.text), len(full.token_ids)
        logprobs = None if full.logprobs is None else full.logprobs[tokens:]
        return replace(full, text=full.text[chars:], token_ids=full.token_ids[tokens:], logprobs=logprobs)

    def _weigh(self, columns: Logprobs, num_new: int) -> None:
        completion = self.completion
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        kept = completion.token_ids[len(completion.logprobs) :]  # fewer than ``num_new`` after a stop string
        assert len(kept) <= num_new
        completion.logprobs += token_logprobs(columns, kept, self._num_also, self._settings.vocabulary)
        completion.cumulative_logprob += sum(array("f", columns.sampled[: len(kept)]))

    def _set_routed(self) -> None:
        """Return the experts of the output, which has ended."""
        if (rows := self._routed) is not None:
            rows.cut(len(self.core_request.prompt_token_ids) + len(self.completion.token_ids) - 1)
            self.completion.routed_experts = to_array(rows) if rows.num_layers else None

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        completion, settings = self.completion, self._settings
        completion.text += self._text.finish()
        completion.finish_reason = _FINISH_REASONS[reason]
        completion.stop_reason = self._text.stop_reason(stop_token_id)
        self._set_routed()
        if settings.reasoning is not None and settings.is_bound_later:
            by_itself = reason is FinishReason.STOP and completion.stop_reason is None
            if settings.reasoning.lacks_answer(has_ended_by_itself=by_itself):
                completion.finish_reason = _FINISH_REASONS[FinishReason.LENGTH]


def token_logprobs(
    columns: Logprobs, token_ids: Sequence[int], num_also: int, vocabulary: Vocabulary | None
) -> list[dict[int, Logprob]]:
    """Return a dict for each of ``token_ids``, [n]: first the token itself, then the best in descending order, then
    the ``num_also`` that the request named.

    ``vocabulary`` decodes the tokens; None: they are not decoded.
    """
    top = columns.top
    # The numbers that the services send, which are of 32 bits.
    sampled, others = array("f", columns.sampled), array("f", columns.logprobs)

    def logprob(token_id: int, value: float, rank: int | None) -> Logprob:
        if vocabulary is None:
            return Logprob(value, rank)
        return Logprob(value, rank, vocabulary.token_bytes(token_id).decode(errors="replace"))

    positions = []
    for index, token_id in enumerate(token_ids):
        found = {token_id: logprob(token_id, sampled[index], columns.rank[index])}
        for place in range(top):
            other = columns.token_ids[index * top + place]
            if other not in found:
                rank = place + 1 if place < top - num_also else None
                found[other] = logprob(other, others[index * top + place], rank)
        positions.append(found)
    return positions


class OfflineRequest:
    """Collects the results of its samples in its ``output``."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        samples: Sequence[OfflineSample],
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        stream_interval: int = 1,
        media: PromptMedia | None = None,
    ) -> None:
        """``output_kind`` and ``stream_interval``, in tokens, decide what :meth:`news` yields, and when. ``media``: the
        prompt's images and sounds."""
        self.samples = samples
        self.media = media
        self.error: Exception | None = None
        self._output_kind = output_kind
        self._stream_interval = stream_interval
        self._reported: set[int] = set()  # samples whose end was yielded
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=samples[0].core_request.prompt_token_ids,
            outputs=[sample.completion for sample in samples],
            finished=False,
        )

    @property
    def finished(self) -> bool:
        return self.output.finished

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens of all samples so far."""
        return sum(len(completion.token_ids) for completion in self.output.outputs)

    def use_weights(self, version: int, *, has_begun: bool) -> None:
        """Note which weights compute what comes next. ``has_begun``: others have computed tokens that are not here."""
        has_begun = has_begun or any(sample.num_tokens for sample in self.samples)
        self.output.weights_versions = (*self.output.weights_versions, version) if has_begun else (version,)

    def accept(self, sample: OfflineSample, step: EngineCoreOutput) -> bool:
        """Add a step's result to a sample. Returns whether a stop string ended the sample, which the core does not
        know. Raises `CoreRefusal`."""
        if step.prefill_stats is not None and self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = step.prefill_stats.num_cached_tokens
        if step.new_prompt_logprobs is not None:
            self.output.prompt_logprobs = sample.prompt_logprobs(step.new_prompt_logprobs)
        is_stopped = sample.accept(step)
        if sample.completion.finished():
            self.output.finished = all(completion.finished() for completion in self.output.outputs)
        return is_stopped

    def abort(self, error: Exception | None = None) -> None:
        """End the samples that have not ended, because of an error if there is one."""
        for sample in self.samples:
            sample.abort("abort" if error is None else "error")
        self.output.finished = True
        if error is not None and self.error is None:
            self.error, self.output.error = error, str(error)

    def news(self) -> Iterator[RequestOutput]:
        """Yield the outputs that are due in a stream: one for each sample with enough new tokens, or one at the end."""
        if self._output_kind is RequestOutputKind.FINAL_ONLY:
            if self.output.finished:
                yield self.output
            return
        whole = self._output_kind is RequestOutputKind.CUMULATIVE
        for sample in self.samples:
            if self._is_due(sample):
                yield replace(self.output, outputs=[sample.news(whole=whole)])

    def _is_due(self, sample: OfflineSample) -> bool:
        index = sample.completion.index
        if sample.completion.finished():
            is_news = index not in self._reported
            self._reported.add(index)
            return is_news
        num_new = sample.num_new_tokens
        return num_new >= self._stream_interval or (num_new > 0 and sample.is_new)
