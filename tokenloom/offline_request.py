"""One prompt of the offline API on its way through the engine core."""

from collections.abc import Collection

from tokenloom.engine_core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.services.output_processor.detokenizer import Detokenizer

from .outputs import CompletionOutput, RequestOutput

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REPETITION: "repetition",
}


class OfflineRequest:
    """Collects a request's tokens and text into its ``output``."""

    def __init__(
        self,
        core_request: EngineCoreRequest,
        prompt: str | None,
        detokenizer: Detokenizer | None,
        eos_token_ids: Collection[int],
    ) -> None:
        """``detokenizer`` None: no text is wanted."""
        self.core_request = core_request
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._completion = CompletionOutput(index=0, text="", token_ids=[])
        self.output = RequestOutput(
            request_id=core_request.request_id,
            prompt=prompt,
            prompt_token_ids=core_request.prompt_token_ids,
            outputs=[self._completion],
            finished=False,
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._completion.token_ids)

    def accept(self, step: EngineCoreOutput) -> bool:
        """Takes what a step produced; returns whether a stop string ended the output, which the core does not know.

        Raises ``RuntimeError`` when the core failed the request.
        """
        if step.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"request {step.request_id} failed: {step.error}")
        if step.prefill_stats is not None:
            self.output.num_cached_tokens = step.prefill_stats.num_cached_tokens
        self._completion.token_ids += step.new_token_ids
        if self._show(step):
            return True
        if step.finish_reason is not None:
            self._finish(step.finish_reason, step.stop_token_id)
        return False

    def _show(self, step: EngineCoreOutput) -> bool:
        if self._detokenizer is None:
            return False
        ends = step.finish_reason is FinishReason.STOP
        text, match = self._detokenizer.step(step.new_token_ids, ends_with_stop_token=ends)
        self._completion.text += text
        if match is None:
            return False
        del self._completion.token_ids[match.num_tokens :]
        self._completion.finish_reason, self._completion.stop_reason = "stop", match.stop_string
        self.output.finished = True
        return True

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        if self._detokenizer is not None:
            self._completion.text += self._detokenizer.finish()
        self._completion.finish_reason = _FINISH_REASONS[reason]
        if stop_token_id not in self._eos_token_ids:
            self._completion.stop_reason = stop_token_id
        self.output.finished = True
