"""Decides from measured times whether drafts pay: the seconds of a token in steps with drafts and in steps without."""

import statistics
from collections import deque
from collections.abc import Callable

from ..data.scheduler_output import ModelRunnerOutput, SchedulerOutput

# Free rows say what verifying costs and not what drafting costs: with recorded steps one stream of the demo model fell
# to 0.91 of its tokens with a draft model and to 0.54 with an EAGLE head, so time itself decides.
SAMPLES = 16
"""Steps of each way that a decision looks at."""
PROBE = 8
"""Steps of the slower way that are measured again."""
FEWEST_BETWEEN = 256
"""Steps of the faster way between two probes."""
# Drafts that cost 3.1, 6 and 40 times a plain step for three tokens leave at least 0.985 of the speed over 100,000
# steps (tests/engine_core/scheduling/test_draft_costs.py).
_PROBES_SHARE = 0.01
"""Share of the time that probes may lose."""


class DraftCosts:
    """Measures steps in which every request decodes, apart for each size of a batch up to a power of two.

    The rule that the rest of speculation keeps makes tokens the same with drafts and without, so this choice, which
    depends on the clock, changes none.
    """

    def __init__(self, clock: Callable[[], int], *, drafting_takes_time: bool) -> None:
        """``clock`` returns nanoseconds. ``drafting_takes_time``: whether a model drafts after a step."""
        self._clock = clock
        self._drafting_takes_time = drafting_takes_time
        self._batches: dict[int, _Batches] = {}
        self._began = 0

    def allows(self, num_requests: int) -> bool:
        """Return whether so many requests get drafts."""
        # By powers of two: verifying is free while a step waits for memory and dear once it is busy with rows, which
        # depends on the batch.
        found = self._batches.get(num_requests.bit_length())
        return found is None or found.allows

    def began(self) -> None:
        """Note that a step was planned."""
        self._began = self._clock()

    def ended(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Count the step that began last."""
        num_requests = len(scheduled.num_scheduled_tokens)
        num_drafts = sum(map(len, scheduled.draft_token_ids.values())) if scheduled.draft_token_ids else 0
        if scheduled.total_num_scheduled_tokens - num_drafts != num_requests:
            return  # some compute prompts
        wants = bool(scheduled.num_drafts_wanted)
        if self._drafting_takes_time and wants != bool(num_drafts):
            return  # drafting begins or ends: one of its costs is missing
        key = num_requests.bit_length()
        batches = self._batches.get(key)
        if batches is None:
            batches = self._batches[key] = _Batches()
        num_tokens = sum(map(len, result.sampled_token_ids))
        batches.add((self._clock() - self._began) * 1e-9, num_tokens, drafted=num_drafts > 0)


class _Batches:
    """Compares the steps of one size of batches. It begins with drafts."""

    def __init__(self) -> None:
        self._samples = {way: deque[tuple[float, int]](maxlen=SAMPLES) for way in (False, True)}
        """Seconds and tokens of the last steps without drafts, and with them."""
        self._fresh = {False: 0, True: 0}
        """Samples since the last decision."""
        self._drafts = True
        self._is_probing = False
        self._wait = 2 * SAMPLES
        """Steps before the next probe."""
        self._debt = 0.0
        """Seconds that must pass before the next probe."""

    @property
    def allows(self) -> bool:
        return self._drafts != self._is_probing

    def add(self, seconds: float, num_tokens: int, *, drafted: bool) -> None:
        """Count a step, and choose what the next one does."""
        self._samples[drafted].append((seconds, num_tokens))
        self._fresh[drafted] += 1
        if drafted == self._drafts:
            self._debt -= seconds
        if min(self._fresh.values()) >= PROBE:
            self._decide()
        elif self._fresh[self._drafts] >= self._wait and self._debt <= 0.0:
            self._is_probing = True

    def _decide(self) -> None:
        seconds = {way: _seconds_per_token(samples) for way, samples in self._samples.items()}
        self._drafts = seconds[True] <= seconds[False]
        slower = self._samples[not self._drafts]
        lost = seconds[not self._drafts] - seconds[self._drafts]
        probed_tokens = PROBE * sum(count for _, count in slower) / len(slower)
        self._debt = probed_tokens * lost / _PROBES_SHARE
        self._fresh = {False: 0, True: 0}
        self._is_probing, self._wait = False, FEWEST_BETWEEN


def _seconds_per_token(samples: deque[tuple[float, int]]) -> float:
    """Return the median of the steps' seconds over the mean of their tokens: something else may hold a step up."""
    tokens = sum(count for _, count in samples) / len(samples)
    # The mean of the tokens, not the median: how many drafts are right is what is measured, and it varies from step to
    # step.
    return statistics.median(seconds for seconds, _ in samples) / max(1.0, tokens)
