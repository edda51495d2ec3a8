"""One prompt of the offline API with its samples, from the first step to the last."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenloom.engine_core.wire.messages import EngineCoreOutput

from .offline_sample import OfflineSample
from .outputs import RequestOutput, RequestOutputKind


class OfflineRequest:
    """Collects what its samples gain into its ``output``."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        samples: Sequence[OfflineSample],
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        stream_interval: int = 1,
    ) -> None:
        """``output_kind`` and ``stream_interval``, in tokens, decide what :meth:`news` tells and when."""
        self.samples = samples
        self._output_kind = output_kind
        self._stream_interval = stream_interval
        self._told: set[int] = set()  # samples whose end was told
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=samples[0].core_request.prompt_token_ids,
            outputs=[sample.completion for sample in samples],
            finished=False,
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all samples."""
        return sum(len(completion.token_ids) for completion in self.output.outputs)

    def accept(self, sample: OfflineSample, step: EngineCoreOutput) -> bool:
        """Takes what a step produced for a sample; returns whether a stop string ended it, which the core does not
        know. Raises ``RuntimeError`` when the core failed it."""
        if step.prefill_stats is not None and self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = step.prefill_stats.num_cached_tokens
        if step.new_prompt_logprobs is not None:
            self.output.prompt_logprobs = sample.prompt_logprobs(step.new_prompt_logprobs)
        is_stopped = sample.accept(step)
        self.output.finished = all(completion.finished() for completion in self.output.outputs)
        return is_stopped

    def abort(self) -> None:
        """Ends the samples that have not ended."""
        for completion in self.output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        self.output.finished = True

    def news(self) -> Iterator[RequestOutput]:
        """What a stream is to tell now: an output for each sample that gained enough, or one at the end of all."""
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
            is_news = index not in self._told
            self._told.add(index)
            return is_news
        num_untold = sample.num_untold_tokens
        return num_untold >= self._stream_interval or (num_untold > 0 and sample.is_untold)
