"""Chooses the drafts that a step verifies, and how many the worker may propose for the next one.

A draft counts only while it equals the token sampled at its position, so nothing here changes a token. Drafts take what
a step has left over: no other request waits for them, and none is preempted for them.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from ..data.config import SpeculativeConfig
from ..data.draft_counts import DraftHistory, SpecDecodingStats
from ..data.request import Request, RequestStatus
from ..data.scheduler_output import UNKNOWN_DRAFT, ModelRunnerOutput, SchedulerOutput
from ..kv_cache.kv_manager import KVManager
from ..structured_output.manager import StructuredOutputManager

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
        self._began = deque[int]()  # of the steps in flight
        self._ended = 0

    def allows(self, num_requests: int) -> bool:
        """Return whether so many requests get drafts."""
        # By powers of two: verifying is free while a step waits for memory and dear once it is busy with rows, which
        # depends on the batch.
        found = self._batches.get(num_requests.bit_length())
        return found is None or found.allows

    def began(self) -> None:
        """Note that a step was planned."""
        self._began.append(self._clock())

    def abandon(self) -> None:
        """Forget the steps in flight, which are lost."""
        self._began.clear()

    def ended(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Count the oldest step in flight. Its time begins when the step before it ends, if it was planned earlier."""
        began, self._ended = max(self._began.popleft(), self._ended), self._clock()
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
        batches.add((self._ended - began) * 1e-9, num_tokens, drafted=num_drafts > 0)


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


class Drafts:
    """Belongs to the scheduler of an engine that speculates."""

    def __init__(
        self,
        config: SpeculativeConfig,
        requests: Mapping[str, Request],
        kv: KVManager,
        grammars: StructuredOutputManager | None,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        defers: bool = False,
    ) -> None:
        """``requests``, ``kv`` and ``grammars`` are the scheduler's. ``clock`` returns nanoseconds. ``defers``: steps
        are planned before the drafts that they verify are known, and how many of those before them are right."""
        self.defers = defers
        self._max_drafts = config.num_speculative_tokens
        self._writes_kv = config.writes_kv
        """Whether the worker needs slots for its proposals, whose KV a draft model or head computes."""
        self._requests = requests
        self._kv = kv
        self._grammars = grammars
        self._proposed: dict[str, list[int]] = {}
        """Drafts of live requests since their last step."""
        self._expected: Mapping[str, int] = {}
        """How many drafts the worker proposes at most after the step planned last, where it keeps them."""
        self.free_rows: int | None = None
        """Rows up to which a step takes hardly longer than one row; None: any number."""
        self.costs: DraftCosts | None = DraftCosts(clock, drafting_takes_time=self._writes_kv)
        """Stops drafts that cost more time than they save; None: nothing does."""
        self._stats = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * self._max_drafts)

    def propose(self, draft_token_ids: Mapping[str, list[int]]) -> None:
        """Set the drafts of the tokens that follow the requests' last ones, for the next step of each. Drafts that a
        grammar forbids are left out. Where the worker keeps them, they are noted for the masks of grammars only."""
        if self.defers:
            self._proposed = dict(draft_token_ids)
            return
        if self._grammars is not None and self._grammars.live:
            draft_token_ids = self._grammars.cut_drafts(draft_token_ids, self._requests)
        self._proposed.update(draft_token_ids)

    def add_to(self, scheduled: SchedulerOutput, running: list[Request], budget: int) -> None:
        """Add drafts to a planned step, as far as ``budget`` further tokens, free rows and free blocks reach, and say
        how many the worker may propose after it."""
        if self.costs is not None:
            self.costs.began()
        if self.defers:
            scheduled.defers_drafts = True
            self._add_expected(scheduled, running, budget)
        else:
            self._add_known(scheduled, running, budget)
        if self.costs is None or self.costs.allows(len(scheduled.num_scheduled_tokens)):
            self._expected = scheduled.num_drafts_wanted = self._wanted(running, scheduled.num_scheduled_tokens)
        else:
            self._expected, scheduled.drafts_paused = {}, True
        if self._writes_kv:
            self._reserve(scheduled, len(running))
        if self.defers:
            self._note_unverified(scheduled)

    def known(self, scheduled: SchedulerOutput) -> Mapping[str, list[int]]:
        """Return the drafts that a step verifies. With ``defers`` the step before it must have ended for the requests
        that are asked about."""
        if not scheduled.defers_drafts:
            return scheduled.draft_token_ids
        proposed = self._proposed
        return {each: proposed.get(each, [])[: len(at)] for each, at in scheduled.draft_token_ids.items()}

    def abandon(self) -> None:
        """Forget the steps in flight, which are lost."""
        self._proposed, self._expected = {}, {}
        if self.costs is not None:
            self.costs.abandon()

    def _add_known(self, scheduled: SchedulerOutput, running: list[Request], budget: int) -> None:
        # Proposals hold for one step of their request: they follow its last token, which that step moves. With pipeline
        # stages other requests have steps before.
        proposed, self._proposed = self._proposed, {}
        if proposed:
            planned = scheduled.num_scheduled_tokens
            self._proposed = {
                request_id: drafts
                for request_id, drafts in proposed.items()
                if request_id not in planned and request_id in self._requests
            }
            num_rows = min(budget, self._rows_left(scheduled.total_num_scheduled_tokens))
            self._add_proposed(scheduled, proposed, num_rows, len(running))

    def _add_expected(self, scheduled: SchedulerOutput, running: list[Request], budget: int) -> None:
        """Plan places for drafts that only the worker will know: as many as it was allowed to propose."""
        places = {request_id: [UNKNOWN_DRAFT] * count for request_id, count in self._expected.items()}
        if places:
            num_rows = min(budget, self._rows_left(scheduled.total_num_scheduled_tokens))
            self._add_proposed(scheduled, places, num_rows, len(running))

    def _note_unverified(self, scheduled: SchedulerOutput) -> None:
        """Count the drafts of a step whose plan is complete, and name each request of which drafts are in flight."""
        drafts = scheduled.draft_token_ids
        for request_id in scheduled.scheduled_cached_reqs.req_ids:
            kv = self._requests[request_id].kv
            if request_id in drafts:
                kv.num_unverified += len(drafts[request_id])
            elif kv.num_unverified:
                drafts[request_id] = []  # it gets none, but where its token lies only the worker will know

    def verify(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> int:
        """Take the rejected drafts of a step off the computed tokens of their requests, and count the accepted ones.
        Returns for how many tokens of the plan the worker had no draft, so that it did not compute them."""
        if self.costs is not None:
            self.costs.ended(scheduled, result)
        if not scheduled.draft_token_ids:
            return 0
        stats = self._stats
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            drafts = scheduled.draft_token_ids.get(request_id)
            if not drafts or (request := self._requests.get(request_id)) is None:
                continue
            num_right = max(0, len(token_ids) - 1)
            num_drafts = result.num_verified.get(request_id, 0) if self.defers else len(drafts)
            if request.status is RequestStatus.RUNNING:  # a preempted one has no computed tokens left
                self._take_off_wrong(request, len(drafts), num_drafts, num_right)
            if not num_drafts:
                continue  # the worker found none to propose
            stats.count(num_drafts, num_right)
            for position in range(num_right):
                stats.num_accepted_tokens_per_pos[position] += 1
            if request.draft_history is None:
                request.draft_history = DraftHistory()
            request.draft_history.add(num_drafts, num_right, request.num_tokens + len(token_ids))
        return num_unproposed(scheduled, result)

    def _take_off_wrong(self, request: Request, num_places: int, num_drafts: int, num_right: int) -> None:
        """Take the drafts that were wrong, or that the worker did not have, off a step with so many places for them."""
        num_valid = num_right
        if self._kv.states is not None:
            num_valid = self._kv.states.verified(request.kv, num_drafts, num_right)
        # The blocks that rejected drafts took stay with the request: the next tokens need them, and giving them back
        # would move the table under the worker.
        request.kv.num_computed_tokens -= num_places - num_valid
        if self.defers:
            request.kv.num_unverified -= num_places

    def accepted(self, request: Request) -> None:
        """Let blocks be hit that accepted drafts have filled. The request has all tokens of the step."""
        self._kv.cache_accepted(request.kv)

    def stats(self) -> SpecDecodingStats:
        """Return the counters as they are now."""
        counters = self._stats
        return SpecDecodingStats(
            counters.num_drafts,
            counters.num_draft_tokens,
            counters.num_accepted_tokens,
            counters.num_accepted_tokens_per_pos.copy(),
        )

    def _rows_left(self, num_rows: int) -> int:
        return 1 << 30 if self.free_rows is None else self.free_rows - num_rows

    def _add_proposed(
        self, scheduled: SchedulerOutput, proposed: Mapping[str, list[int]], num_rows: int, num_running: int
    ) -> None:
        cached = scheduled.scheduled_cached_reqs
        pool, states = self._kv.pool, self._kv.states
        # One block for each running request stays free: drafts that took the last ones would cause a preemption in the
        # next step.
        spare_blocks = pool.num_free // pool.num_groups - num_running
        for index, request_id in enumerate(cached.req_ids):
            drafts = proposed.get(request_id)
            if drafts is None or request_id in cached.resumed_token_ids:
                continue
            request = self._requests[request_id]
            num_tokens = request.num_tokens + request.num_output_placeholders
            if request.kv.num_computed_tokens != num_tokens or not _gets_drafts(request):
                continue  # it computes tokens that it had before, or its drafts were wrong since it got these
            # A slot stays free for each request, too; and drafts follow one token, no others that are computed again.
            if states is not None and (
                states.pool.num_free <= num_running
                or scheduled.num_scheduled_tokens[request_id] > 1
                or (request.kv.state is not None and request.kv.state.lent_slot >= 0)  # one step must end there
            ):
                continue
            most = min(len(drafts), self._max_drafts, num_rows, request.max_num_tokens - num_tokens - 1)
            if most > spare_blocks * self._kv.block_size:
                most = min(most, -num_tokens % self._kv.block_size)  # the rest of the last block
            if most <= 0:
                continue
            new_block_ids = self._extend(request, 1, most)
            assert new_block_ids is not None, "as many blocks are free"
            spare_blocks -= len(new_block_ids) // pool.num_groups
            if states is not None:
                states.add_drafts(request.kv, most)
            cached.new_block_ids[index] = cached.new_block_ids[index] + new_block_ids
            request.kv.num_computed_tokens += most
            scheduled.draft_token_ids[request_id] = drafts[:most]
            scheduled.num_scheduled_tokens[request_id] += most
            scheduled.total_num_scheduled_tokens += most
            num_rows -= most

    def _reserve(self, scheduled: SchedulerOutput, num_running: int) -> None:
        """Allocate the blocks in which the worker computes its proposals. Without them it proposes fewer."""
        pool = self._kv.pool
        blocks_of = {new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        index_of = {request_id: index for index, request_id in enumerate(cached.req_ids)}
        for request_id, count in scheduled.num_drafts_wanted.items():
            num_scheduled, request = scheduled.num_scheduled_tokens.get(request_id), self._requests[request_id]
            # The step may end nearer to the limit than the request was when they were wanted, because drafts are right.
            # The last token is never computed.
            count = min(count, request.max_num_tokens - 1 - request.kv.num_computed_tokens)
            # More stays free than beside drafts to verify: a proposal may still be dropped, and the blocks that the
            # next step needs for its own tokens come first.
            if num_scheduled is None or count <= 0 or pool.num_free // pool.num_groups <= 2 * num_running:
                continue
            new_block_ids = self._extend(request, num_scheduled, count)
            if not new_block_ids:
                continue
            if request_id in blocks_of:
                blocks_of[request_id] += new_block_ids
            else:
                index = index_of[request_id]
                cached.new_block_ids[index] = cached.new_block_ids[index] + new_block_ids

    def _extend(self, request: Request, num_scheduled: int, count: int) -> list[int] | None:
        """Allocate blocks for ``count`` tokens after the step's own. Returns those added; None if too few are free."""
        return self._kv.extend(request.kv, num_scheduled, count)

    def _wanted(self, running: Sequence[Request], planned: Collection[str]) -> dict[str, int]:
        """Share the rows that the next step has left over among the requests that sample a token in this one, whose ids
        are among ``planned``."""
        num_rows, sampling = 0, []
        for request in running:
            missing = request.num_missing_tokens
            num_rows += max(1, missing)
            if missing <= 0 and request.request_id in planned and _gets_drafts(request):
                sampling.append(request)
        if not sampling:
            return {}
        share = min(self._max_drafts, self._rows_left(num_rows) // len(sampling))
        wanted = {}
        for request in sampling:
            # Limits end the output after the token of this step, the drafts, and the token after them.
            if (most := min(share, request.max_num_tokens - request.num_tokens - 2)) > 0:
                wanted[request.request_id] = most
        return wanted


def num_unproposed(scheduled: SchedulerOutput, result: ModelRunnerOutput) -> int:
    """Return for how many tokens of a plan the worker had no draft, so that it did not compute them."""
    if not scheduled.defers_drafts:
        return 0
    return sum(map(len, scheduled.draft_token_ids.values())) - sum(result.num_verified.values())


def _gets_drafts(request: Request) -> bool:
    return request.draft_history is None or request.draft_history.allows(request.num_tokens)
