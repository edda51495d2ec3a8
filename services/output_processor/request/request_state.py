"""One request from Submit to RequestFinished: its journal, its text, its times. No I/O."""

import time
from collections.abc import Callable, Sequence

from tokenloom.request import errors, logprob_columns
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs, Submit
from tokenloom.v1.types_pb2 import FinishReason, Logprobs, Timeline

from ..text.detokenizer import Detokenizer, StopMatch, Vocabulary
from ..text.logprob_texts import PromptLogprobs, with_texts


class RequestState:
    """What the output processor knows of a request.

    Attributes:
        token_ids: The journal: output tokens of all attempts, up to the stop string if one was found.
        stop_match: The stop string that ended the output; whatever the engine still says does not count.
        timeline: Filled as things happen, the times of tokens at the end.
        num_attempts: 1, and one more for each time that an engine failed.
    """

    def __init__(
        self,
        submit: Submit,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        sample_index: int = 0,
    ) -> None:
        text = submit.text
        self._sample_index = sample_index
        self._vocabulary = vocabulary
        self._slot = submit.slot
        self._prompt_tokens = len(submit.prompt.token_ids)
        self._accepted = tuple(submit.accepted_token_ids)
        self._stop_token_ids = frozenset(submit.sampling_params.stop_token_ids)
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._detokenizer = Detokenizer(
            vocabulary,
            submit.prompt.token_ids,
            stop=text.stop,
            min_tokens=submit.sampling_params.min_tokens,
            include_stop_str=text.include_stop_str_in_output,
            skip_special=text.skip_special_tokens if text.HasField("skip_special_tokens") else True,
            spaces_between_special=(
                text.spaces_between_special_tokens if text.HasField("spaces_between_special_tokens") else True
            ),
            detokenize=text.detokenize if text.HasField("detokenize") else True,
        )
        self._prompt_logprobs = None
        if submit.sampling_params.HasField("prompt_logprobs"):
            self._prompt_logprobs = PromptLogprobs(vocabulary, submit.prompt.token_ids)
        self._bytes_to_skip = submit.emitted_text_bytes
        # Kept as numbers until the end: a protobuf field costs as much to set as a token to decode.
        self._first_token_ns = self._last_token_ns = self._detokenize_ns = 0
        self._prefill: Finished | None = None
        self.token_ids: list[int] = []
        self.stop_match: StopMatch | None = None
        self.timeline = Timeline()
        self.num_attempts = 1

    def replay(self) -> str:
        """Takes the tokens of earlier attempts; returns what they give beyond the text that the client has."""
        return self._unsent(self._detokenize(self._accepted)) if self._accepted else ""

    def accept(self, token_index: int, token_ids: Sequence[int]) -> tuple[str, StopMatch | None]:
        """Takes new tokens; returns the text that can be shown, and the stop string that they completed.

        Not to be called after a stop string. Raises ``Internal`` when tokens are missing or doubled.
        """
        assert self.stop_match is None
        if token_index != len(self.token_ids):
            raise errors.Internal("the engine's tokens do not follow one another")
        self._last_token_ns = now = self._clock()
        if not self._first_token_ns:
            self._first_token_ns = now
        text = self._detokenize(token_ids)
        if self._bytes_to_skip:
            text = self._unsent(text)
        self._detokenize_ns += self._clock() - now
        return text, self.stop_match

    def logprobs(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs) -> SlotTextLogprobs:
        """Of tokens that were just taken, as the gateway is told; what a stop string cut off is left out."""
        told = with_texts(self._vocabulary, token_ids, logprob_columns.part(logprobs, 0, len(token_ids)))
        told.token_index = token_index
        return told

    def prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> SlotTextLogprobs | None:
        """Of the prompt, if they are news to the gateway. Raises ``Internal`` when they cannot be the prompt's."""
        if self._prompt_logprobs is None:
            raise errors.Internal("the engine tells of a prompt that nobody asked about")
        return self._prompt_logprobs.take(token_index, logprobs)

    def prefilled(self, finished: Finished) -> None:
        """The prefill leg ended; another goes on, and everything from the first token on counts as decoding."""
        self._prefill = finished

    def end(self, finished: Finished) -> tuple[str, RequestFinished]:
        """The engine ended the attempt: the text that was held back, and the end of the request."""
        self._prefill = self._prefill or finished
        self.timeline.queued_ns = self._prefill.queued_ns
        self.timeline.prefill_ns = self._prefill.prefill_ns
        self.timeline.kv_transfer_ns = finished.kv_wait_ns
        if self.stop_match is not None:
            return "", self._finished(FinishReason.FINISH_REASON_STOP, self.stop_match.stop_string)
        if finished.reason == FinishReason.FINISH_REASON_ERROR:
            return "", self.failed(errors.from_proto(finished.error))
        if finished.num_output_tokens != len(self.token_ids):
            return "", self.failed(errors.Internal("the engine's last tokens are missing"))
        text = self._unsent(self._detokenizer.finish())
        return text, self._finished(finished.reason, self._stop_reason(finished))

    def stopped(self) -> RequestFinished:
        """The end by a stop string when no engine is left to confirm it."""
        assert self.stop_match is not None
        return self._finished(FinishReason.FINISH_REASON_STOP, self.stop_match.stop_string)

    def aborted(self) -> RequestFinished:
        """The gateway cancelled it."""
        return self._finished(FinishReason.FINISH_REASON_ABORT)

    def failed(self, error: BaseException) -> RequestFinished:
        """It ends with an error; what was held back for a stop string is not shown."""
        message = self._finished(FinishReason.FINISH_REASON_ERROR)
        message.error.CopyFrom(errors.to_proto(error))
        return message

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        ends = bool(token_ids) and token_ids[-1] in self._stop_token_ids
        text, self.stop_match = self._detokenizer.step(token_ids, ends_with_stop_token=ends)
        self.token_ids.extend(token_ids)
        if self.stop_match is not None:
            del self.token_ids[self.stop_match.num_tokens :]
        return text

    def _unsent(self, text: str) -> str:
        """The part beyond the bytes that the client already has."""
        if not self._bytes_to_skip:
            return text
        data = text.encode()
        skipped = min(self._bytes_to_skip, len(data))
        self._bytes_to_skip -= skipped
        return data[skipped:].decode(errors="ignore")

    def _stop_reason(self, finished: Finished) -> str:
        if not finished.HasField("stop_token_id") or finished.stop_token_id in self._eos_token_ids:
            return ""
        return str(finished.stop_token_id)

    def _finished(self, reason: FinishReason, stop_reason: str = "") -> RequestFinished:
        self.timeline.decode_ns = self._last_token_ns - self._first_token_ns
        self.timeline.detokenize_ns = self._detokenize_ns
        return RequestFinished(
            slot=self._slot,
            sample_index=self._sample_index,
            reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=self._prefill.cached_tokens if self._prefill is not None else 0,
            attempts=self.num_attempts,
            timeline=self.timeline,
        )
