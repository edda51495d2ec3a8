"""Makes the output of one sample: its journal of tokens, its text, its times and its end. No I/O."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tokenloom.request import errors, logprob_columns, wire_errors
from tokenloom.request.packed_ids import ids_of
from tokenloom.request.routed_rows import RoutedRows, routed_message
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1.engine_pb2 import Finished, KVSource
from tokenloom.v1.output_processor_pb2 import RequestFinished, SampleJournal, SamplePosition, SlotTextLogprobs, Submit
from tokenloom.v1.types_pb2 import Fingerprint, FinishReason, Logprobs, RoutedExperts, SamplingParams, Timeline

from ..text.detokenizer import Detokenizer, OutputText, StopMatch
from ..text.vocabulary import Vocabulary
from .outbox import NOWHERE, Outbox, PacedOutbox
from .telemetry import OutputTrail

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuAccount

_ABORT, _ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR
_STOP, _PREFILLED = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_PREFILLED
SAMPLE_TOKENS: Final = 60
"""So many tokens cost this process as much as the begin and the end of a sample: 0.3 ms, and 2.6 µs for each token in
frames of many."""
VERSION_DIGITS = 16
"""Of a fingerprint of weights, in answers."""
_TOKEN_BYTES = 36
"""Memory of a token in a journal: an integer, and the list's reference to it."""
_OBJECT_BYTES = 8192
"""Memory of the objects and messages of one output: 12 kB were measured of a request with 16 tokens, its Submit
included."""


class SampleOutput:
    """Turns the tokens of a sample's attempts into text, and puts both into the outbox of the gateway's stream.

    Exactly one of ``finish``, ``stop``, ``abort`` and ``fail`` ends it. Nothing may be added after that.

    Attributes:
        sample_index: Number of the sample.
        token_ids: The journal: output tokens of all attempts, up to the stop string if one was found.
        routed: The experts of its tokens; None unless they are asked for.
        stop_match: The stop string that ended the output; later tokens and reasons of the engine do not count.
        timeline: Filled as the request proceeds; the times of tokens are filled in at the end.
        clock: Returns nanoseconds.
        num_attempts: 1, and one more for each engine that was replaced after it failed.
        weights: Fingerprints of those that computed its tokens, and compute the next ones, in order; several only after
            a change of weights for which an operator let requests go on. Empty: unknown.
        numerics: Of the engine that computes the next ones; empty: unknown.
        num_given: Tokens that an output processor which was lost has sent.
        trail: What a record of it holds; None: it is not recorded.
        account: Bills what it costs this process; None without ``--bill``.
        finished: How it ended; None while it runs.
    """

    def __init__(
        self,
        submit: Submit,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        outbox: Outbox,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        sample_index: int = 0,
        journal: SampleJournal | None = None,
        trail: OutputTrail | None = None,
    ) -> None:
        """``journal``: what the client has of the sample, from an output processor that was lost. ``trail``: gets what
        a record of it holds."""
        params, interval = submit.sampling_params, submit.text.stream_interval
        prompt_ids = submit.prompt.token_ids or ids_of(submit.prompt)
        self._num_prompt_tokens = len(prompt_ids)
        self._submit = submit
        self._key = submit.slot, sample_index
        self._interval = interval
        self._outbox = outbox
        self.num_given = 0 if journal is None else len(journal.token_ids)
        self._rows = PacedOutbox(outbox, interval, self.num_given) if interval > 1 else outbox
        self._vocabulary = vocabulary
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._max_tokens = params.max_tokens or sys.maxsize
        self.clock = clock
        self._text = OutputText(detokenizer_of(submit, vocabulary), self._stop_token_ids, eos_token_ids)
        has_prompt_logprobs = params.HasField("prompt_logprobs")
        num_known = submit.num_prompt_logprobs
        self._prompt_logprobs = PromptLogprobTexts(vocabulary, prompt_ids, num_known) if has_prompt_logprobs else None
        self._journal = journal
        self.weights: list[bytes] = [] if journal is None else list(journal.weights)
        self.numerics = "" if journal is None else journal.numerics
        self._continues = journal is not None  # tokens that others have computed, even if it has none itself
        self._bytes_to_skip = 0 if journal is None else journal.emitted_text_bytes
        # Kept as numbers until the end: setting a protobuf field costs as much as decoding a token.
        self._first_token_ns = self._last_token_ns = self._detokenize_ns = 0
        self._prefill: Finished | None = None
        # Log probabilities cannot be made again, unlike text.
        has_logprobs = has_prompt_logprobs or params.HasField("logprobs")
        self._kept_logprobs: list[SlotTextLogprobs] | None = [] if submit.fingerprint and has_logprobs else None
        self.trail = trail
        self.account: CpuAccount | None = None
        self.routed: RoutedOutput | None = None
        if params.return_routed_experts:
            self.routed = RoutedOutput(params, len(prompt_ids), sample_index)
        self.sample_index = sample_index
        self.token_ids = self._text.token_ids
        self.finished: RequestFinished | None = None
        self.stop_match: StopMatch | None = None
        self.timeline = Timeline() if journal is None else Timeline(mixed_numerics=journal.mixed_numerics)
        self.num_attempts = 1

    def work(self) -> int:
        """Return what this process has done for it, in tokens that it turned into text."""
        return SAMPLE_TOKENS + len(self.token_ids)

    def ended_elsewhere(self, finished: RequestFinished) -> None:
        """Take the journal of a sample that had ended at an output processor that was lost. Nothing is sent of it until
        a call resumes the request."""
        self.replay()
        self.finished = finished

    def replay(self) -> StopMatch | None:
        """Take the tokens of the journal, send their text beyond what the client has, and return the stop string that
        they complete."""
        journal, self._journal = self._journal, None
        if journal is None:
            return None
        text, match = self._text.add(journal.token_ids)
        self.stop_match = match
        if text := self._unsent(text):
            self._rows.add(self._key, text, len(self.token_ids), ())
        return match

    def compute_with(self, serves: Fingerprint) -> None:
        """Note what the engine serves that computes the next tokens, and tell the gateway, whose next output processor
        must know."""
        before, self.numerics = self.numerics, serves.numerics
        if before and before != serves.numerics and (self.token_ids or self._continues):
            self.timeline.mixed_numerics = True
        if not self.token_ids:  # the answer names them with the first token
            self.weights = [serves.weights] if serves.weights else []
            return
        if serves.weights and self.weights[-1:] != [serves.weights]:
            self.weights.append(serves.weights)
        self._tell_weights(self._outbox)

    def _tell_weights(self, outbox: Outbox) -> None:
        if self.weights or self.numerics:
            outbox.add_weights(self._key, self.weights, self.numerics, is_mixed=self.timeline.mixed_numerics)

    def add(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> StopMatch | None:
        """Send new tokens and the text that can be shown; return the stop string that they completed.

        Args:
            token_index: Position of the first of them in the whole output.
            logprobs: Those of these tokens, if the request asked for them.

        Tokens after a stop string are ignored. Raises ``WrongFrame`` when tokens are missing or doubled, or too many.
        """
        if self.stop_match is not None:
            return None
        # An error and not a guess: wrong text is worse than an answer that another engine continues.
        if token_index != len(self.token_ids):
            raise WrongFrame("the engine skipped or repeated tokens")
        if token_index + len(token_ids) > self._max_tokens:
            raise WrongFrame(f"the engine sent more than {self._max_tokens} tokens")
        self._last_token_ns = now = self.clock()
        if not self._first_token_ns:
            self._first_token_ns = now
            if not token_index:  # otherwise compute_with has said it
                self._tell_weights(self._outbox)
        text, match = self._text.add(token_ids)
        # After a loss the text is counted in bytes and not characters: the piece that the client had last may have
        # ended where a character of several tokens was still incomplete.
        if self._bytes_to_skip:
            text = self._unsent(text)
        self._detokenize_ns += self.clock() - now
        if match is not None:
            self.stop_match = match
            token_ids = token_ids[: match.num_tokens - token_index]
        if logprobs is not None:
            self._add_logprobs(token_index, token_ids, logprobs)
        self._rows.add(self._key, text, token_index, token_ids)
        return match

    def add_prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> None:
        """Send log probabilities of the prompt, unless an earlier attempt already brought them.

        Raises ``WrongFrame`` when they cannot be those of the prompt.
        """
        if self._prompt_logprobs is None:
            raise WrongFrame("the engine sent log probabilities of the prompt, which the request did not ask for")
        if (columns := self._prompt_logprobs.take(token_index, logprobs)) is not None:
            self._send_logprobs(columns)

    def prefilled(self, finished: Finished) -> None:
        """Note the end of the first prefill leg: everything after the first token counts as decoding."""
        self._prefill = self._prefill or finished

    def retry(self) -> None:
        """Note that an engine failed this sample and that its leg is placed again."""
        self.num_attempts += 1

    def engine_died(self) -> None:
        """Report to the gateway that an engine died while it ran only this request."""
        self._outbox.engine_died(self._key[0])

    def finish(self, finished: Finished) -> RequestFinished:
        """End because the engine has finished, and send the text that was held back for a stop string."""
        # The first engine that ended a prefill counts: after a loss the next one finds the prompt in caches, and its
        # figures would hide what the client has waited for.
        self._prefill = self._prefill or finished
        self.timeline.queued_ns = self._prefill.queued_ns
        self.timeline.prefill_ns = self._prefill.prefill_ns
        self.timeline.kv_transfer_ns = finished.kv_wait_ns
        if finished.HasField("drafts"):
            self.timeline.drafts.CopyFrom(finished.drafts)
        if self.stop_match is not None:
            return self._end(_STOP, self.stop_match.stop_string)
        if finished.reason == _ERROR:
            return self.fail(wire_errors.from_proto(finished.error))
        if text := self._unsent(self._text.finish()):
            self._rows.add(self._key, text, len(self.token_ids), ())
        if finished.reason == _PREFILLED:  # another request continues from the KV that the engine keeps
            source = KVSource(weights=self.weights[-1] if self.weights else b"")
            source.MergeFrom(finished.kv)
            return self._end(FinishReason.FINISH_REASON_LENGTH, kv=source)
        token_id = self._text.stop_reason(finished.stop_token_id) if finished.HasField("stop_token_id") else None
        return self._end(finished.reason, "" if token_id is None else str(token_id))

    def stop(self) -> RequestFinished:
        """End with the stop string that was found, without an engine that confirms it."""
        assert self.stop_match is not None
        return self._end(_STOP, self.stop_match.stop_string)

    def abort(self) -> RequestFinished:
        """End because the gateway cancelled the request."""
        return self._end(_ABORT)

    def fail(self, error: BaseException) -> RequestFinished:
        """End with an error; text that was held back for a stop string is not shown."""
        return self._end(_ERROR, error=error)

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of memory that the output takes, about."""
        num_bytes = _OBJECT_BYTES + _TOKEN_BYTES * len(self.token_ids)
        return num_bytes + sum(columns.ByteSize() for columns in self._kept_logprobs or ())

    @property
    def can_repeat(self) -> bool:
        """Whether everything is here that :meth:`attach` sends. Log probabilities of tokens that another output
        processor sent are not."""
        if self._kept_logprobs is None:
            return True
        first = next(
            (columns.token_index for columns in self._kept_logprobs if not columns.prompt), len(self.token_ids)
        )
        has_all = first == 0 or not self._submit.sampling_params.HasField("logprobs")
        return has_all and not self._submit.num_prompt_logprobs

    def detach(self) -> None:
        """Send nothing more, because the gateway was lost; the output is kept for :meth:`attach`."""
        self._outbox = self._rows = NOWHERE

    def check(self, position: SamplePosition) -> None:
        """Raise ``InvalidArgument`` for a position beyond the output."""
        if position.num_tokens > len(self.token_ids):
            message = f"the output has {len(self.token_ids)} tokens, not {position.num_tokens}"
            raise errors.InvalidArgument(message, "positions")

    def attach(self, outbox: Outbox, slot: int, position: SamplePosition) -> None:
        """Send the output from a position on, and everything that follows, to another slot or stream."""
        start = position.num_tokens
        data = self.text_so_far().encode()
        self._key = slot, self._key[1]
        self._outbox = outbox
        self._rows = PacedOutbox(outbox, self._interval) if self._interval > 1 else outbox
        self._tell_weights(outbox)
        self._bytes_to_skip = max(position.emitted_text_bytes - len(data), 0)
        text = data[position.emitted_text_bytes :].decode(errors="ignore")
        for columns in self._kept_logprobs or ():
            if (rest := part_with_texts(columns, 0 if columns.prompt else start)) is not None:
                self._rows.add_logprobs(self._key, rest)
        if text or start < len(self.token_ids):
            self._rows.add(self._key, text, start, self.token_ids[start:])
        if self.finished is not None:
            finished = RequestFinished()
            finished.CopyFrom(self.finished)
            finished.slot = slot
            self._rows.finish(finished)

    def text_so_far(self) -> str:
        """Return all text that was sent, made again from the tokens."""
        again = OutputText(detokenizer_of(self._submit, self._vocabulary), self._stop_token_ids)
        text, _ = again.add(self.token_ids)
        return text if self.finished is None else text + again.finish()

    def _add_logprobs(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """Send the log probabilities of tokens that were just added, without those of tokens after a stop string."""
        columns = with_texts(self._vocabulary, token_ids, logprob_columns.part(logprobs, 0, len(token_ids)))
        columns.token_index = token_index
        self._send_logprobs(columns)

    def _send_logprobs(self, columns: SlotTextLogprobs) -> None:
        if self._kept_logprobs is not None:
            self._kept_logprobs.append(columns)
        if self.trail is not None:
            self.trail.keep(columns)
        self._rows.add_logprobs(self._key, columns)

    def _unsent(self, text: str) -> str:
        """Return the part of the text beyond the bytes that the client already has."""
        if not self._bytes_to_skip:
            return text
        data = text.encode()
        skipped = min(self._bytes_to_skip, len(data))
        self._bytes_to_skip -= skipped
        return data[skipped:].decode(errors="ignore")

    @property
    def _num_cached(self) -> int:
        """Prompt tokens that a cache had; an attempt that continued an output may have found more than the prompt."""
        return min(self._prefill.cached_tokens, self._num_prompt_tokens) if self._prefill is not None else 0

    def _end(
        self,
        reason: FinishReason,
        stop_reason: str = "",
        *,
        error: BaseException | None = None,
        kv: KVSource | None = None,
    ) -> RequestFinished:
        self.timeline.decode_ns = self._last_token_ns - self._first_token_ns
        self.timeline.detokenize_ns = self._detokenize_ns
        if self.account is not None:
            self.timeline.cpu.output_processor_ns = self.account.close()
        slot, sample_index = self._key
        routed = None if error is not None or self.routed is None else self.routed.message(len(self.token_ids))
        finished = RequestFinished(
            slot=slot,
            sample_index=sample_index,
            reason=reason,
            stop_reason=stop_reason,
            error=None if error is None else wire_errors.to_proto(error),
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=self._num_cached,
            attempts=self.num_attempts,
            timeline=self.timeline,
            routed_experts=routed,
            kv=kv,
            weights_version=weights_version(self.weights),
            numerics=self.numerics,
        )
        self.finished = finished
        self._rows.finish(finished)
        return finished


def weights_version(weights: Sequence[bytes]) -> str:
    """Return what names these weights in answers: the beginnings of their fingerprints."""
    return "+".join([each.hex()[:VERSION_DIGITS] for each in weights])


class RoutedOutput:
    """Joins which experts computed the tokens of one sample, as its attempts report them."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, sample_index: int) -> None:
        start = params.routed_experts_prompt_start
        # The first sample reports the prompt, whose experts are the same for all.
        self._first = start if sample_index == 0 else max(start, num_prompt_tokens)
        self._rows = RoutedRows(self._first)
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def next_start(self) -> int:
        """Return the position from which on the next attempt has to report experts."""
        return self._rows.end

    def add(self, part: RoutedExperts, num_output_tokens: int) -> None:
        """Add what an attempt reports, when the output has so many tokens."""
        self._rows.add(part, self._num_prompt_tokens + num_output_tokens)

    def message(self, num_output_tokens: int) -> RoutedExperts | None:
        """Return the experts of an output that has ended; None if some are missing."""
        end = self._num_prompt_tokens + num_output_tokens - 1
        self._rows.cut(end)
        is_complete = self._rows.start == self._first and self._rows.end == end > self._first
        return routed_message(self._rows) if is_complete else None


def detokenizer_of(submit: Submit, vocabulary: Vocabulary) -> Detokenizer:
    """Return what makes the text of one sample of a request."""
    text = submit.text
    return Detokenizer(
        vocabulary,
        submit.prompt.token_ids or ids_of(submit.prompt),
        stop=text.stop,
        min_tokens=submit.sampling_params.min_tokens,
        include_stop_str=text.include_stop_str_in_output,
        skip_special=text.skip_special_tokens if text.HasField("skip_special_tokens") else True,
        spaces_between_special=(
            text.spaces_between_special_tokens if text.HasField("spaces_between_special_tokens") else True
        ),
        detokenize=text.detokenize if text.HasField("detokenize") else True,
    )


def with_texts(vocabulary: Vocabulary, token_ids: Sequence[int], logprobs: Logprobs) -> SlotTextLogprobs:
    """Return the log probabilities with texts; the caller fills in slot, sample and position.

    ``token_ids``: [n] the tokens that were sampled.
    """
    # Bytes and not text: a token may end inside a character. vLLM then gives the bytes of its replacement character;
    # here `bytes` in an answer are the token's own.
    text = vocabulary.token_bytes
    return SlotTextLogprobs(
        logprobs=logprobs, sampled_text=map(text, token_ids), token_text=map(text, logprobs.token_id)
    )


def part_with_texts(columns: SlotTextLogprobs, start: int) -> SlotTextLogprobs | None:
    """Return a copy of the positions from token ``start`` of the output on; None if it would be empty."""
    skipped, top = max(start - columns.token_index, 0), columns.logprobs.top
    num_positions = logprob_columns.num_positions(columns.logprobs)
    if skipped >= num_positions:
        return None
    rest = SlotTextLogprobs()
    if not skipped:
        rest.CopyFrom(columns)
        return rest
    rest.token_index = columns.token_index + skipped
    rest.logprobs.CopyFrom(logprob_columns.part(columns.logprobs, skipped, num_positions))
    rest.sampled_text.extend(columns.sampled_text[skipped:])
    rest.token_text.extend(columns.token_text[skipped * top :])
    return rest


class PromptLogprobTexts:
    """Passes on the log probabilities of one prompt, from its second token on: each once, though attempts repeat."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], num_given: int = 0) -> None:
        """``num_given``: positions, from the second token on, that the client has already."""
        self._vocabulary = vocabulary
        self._prompt_ids = prompt_ids
        self._next = 1 + num_given

    def take(self, token_index: int, logprobs: Logprobs) -> SlotTextLogprobs | None:
        """Return the positions that were not passed on yet; None if an earlier attempt brought all of them.

        Raises ``WrongFrame`` when they cannot be those of the prompt.
        """
        end = token_index + len(logprobs.sampled)
        if token_index > self._next or end > len(self._prompt_ids):
            raise WrongFrame("the engine's log probabilities are not those of the prompt")
        start, self._next = self._next, max(self._next, end)
        if start >= end:
            return None
        columns = logprob_columns.part(logprobs, start - token_index, end - token_index)
        texts = with_texts(self._vocabulary, self._prompt_ids[start:end], columns)
        texts.prompt, texts.token_index = True, start
        if start == 1:
            texts.first_text = self._vocabulary.token_bytes(self._prompt_ids[0])
        return texts
