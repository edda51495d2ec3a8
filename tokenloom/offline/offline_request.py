"""Follows one prompt of the offline API and its samples from the first step to the last."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenloom.engine_core.data.messages import EngineCoreOutput

from .offline_sample import OfflineSample
from .outputs import RequestOutput, RequestOutputKind


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
    ) -> None:
        """``output_kind`` and ``stream_interval``, in tokens, decide what :meth:`news` yields, and when."""
        self.samples = samples
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
        reason = "abort" if error is None else "error"
        for completion in self.output.outputs:
            completion.finish_reason = completion.finish_reason or reason
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
