"""A core in the waves of its group, without processes."""

import msgspec
import pytest

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_config, make_request
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data_parallel.messages import Called, Outcome, Vote, VoteVerdict, Want, Welcome
from tokenloom.engine_core.data_parallel.wave_loop import STEPS_BETWEEN_VOTES, WaveLoop
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


class Votes:
    """Keeps what is cast."""

    def __init__(self) -> None:
        self.cast_votes: list[Vote] = []

    def cast(self, vote: Vote) -> None:
        self.cast_votes.append(vote)


class CountingWorker(HashWorker):
    """Counts dummy batches."""

    num_dummies = 0

    def execute_dummy_batch(self) -> None:
        super().execute_dummy_batch()
        self.num_dummies += 1


class Rank:
    """A core over the hash worker with experts, as rank 1 of 2."""

    def __init__(self, *, overlaps: bool = False, **parallel: bool) -> None:
        config = make_config(num_blocks=20, async_scheduling=overlaps)
        config = msgspec.structs.replace(
            config, parallel=ParallelConfig(data_parallel_size=2, data_parallel_rank=1, **parallel)
        )
        self.worker = CountingWorker(config, experts_per_token=8, max_model_len=60)
        self.core = EngineCore(config, EXECUTORS["late" if overlaps else "uniproc"](self.worker))
        self.votes = Votes()
        self.loop = WaveLoop(self.core, config.parallel, self.votes)
        self.loop.take(Welcome(0, 0, runs=False, size=2))
        self.tokens: list[int] = []

    def decide(self, verdict: VoteVerdict, size: int = 2) -> None:
        vote = self.votes.cast_votes[-1]
        self.loop.take(Outcome(vote.wave, vote.step, verdict, size))

    def turn(self) -> None:
        outputs = self.loop.turn(self.core.step, self.worker.execute_dummy_batch)
        self.tokens += [token for output in outputs.outputs for token in output.new_token_ids] if outputs else []


def test_no_request_is_computed_before_the_ranks_agree() -> None:
    rank = Rank()
    rank.core.add_request(make_request("a", [1, 2], max_tokens=3))
    rank.loop.settle()
    assert rank.votes.cast_votes == [Vote(0, 0, Want.RUN, 2)]
    while rank.loop.has_work():
        rank.turn()
    assert not rank.tokens
    rank.decide(VoteVerdict.RUN)
    for _ in range(STEPS_BETWEEN_VOTES):
        assert rank.loop.has_work()
        rank.turn()
    assert rank.tokens == expected_tokens([1, 2], 3)[-3:]
    assert rank.worker.num_dummies == STEPS_BETWEEN_VOTES - 3, "each other turn computes a dummy batch"
    assert rank.votes.cast_votes[-1] == Vote(0, 32, Want.IDLE, 2)


def test_a_pause_is_complete_when_the_wave_has_ended() -> None:
    rank = Rank()
    rank.core.add_request(make_request("a", [1, 2], max_tokens=50))
    rank.loop.settle()
    rank.decide(VoteVerdict.RUN)
    quiet = rank.core.pause("keep")
    for _ in range(STEPS_BETWEEN_VOTES):
        rank.turn()
    assert not quiet.done()
    assert rank.votes.cast_votes[-1] == Vote(0, 32, Want.PAUSED, 2)
    rank.decide(VoteVerdict.REST)
    assert quiet.done()
    assert not rank.tokens
    rank.core.resume()
    assert rank.votes.cast_votes[-1] == Vote(1, 0, Want.RUN, 2)


def test_a_rank_without_requests_votes_when_another_one_calls() -> None:
    rank = Rank()
    rank.loop.take(Called(0))
    rank.loop.take(Called(0))
    assert rank.votes.cast_votes == [Vote(0, 0, Want.IDLE, 2)]
    rank.decide(VoteVerdict.RUN)
    assert rank.loop.has_work()


def test_the_null_block_belongs_to_no_request() -> None:
    rank = Rank()
    assert rank.core.scheduler.kv.pool.num_blocks == 19
    assert rank.core.ready.has_waves


def test_spread_experts_keep_the_size_of_their_group() -> None:
    rank = Rank(enable_expert_parallel=True)
    with pytest.raises(ValueError, match="start the group again with another size"):
        rank.loop.resize(3)


def test_pipeline_stages_are_refused() -> None:
    parallel = ParallelConfig(data_parallel_size=2, pipeline_parallel_size=2)
    config = msgspec.structs.replace(make_config(), parallel=parallel)
    with pytest.raises(ValueError, match="leave out pipeline_parallel_size"):
        EngineCore(config, UniProcExecutor(HashWorker(config, experts_per_token=8)))


def test_overlapping_steps_are_one_forward_pass_a_turn() -> None:
    rank = Rank(overlaps=True)
    rank.core.add_request(make_request("a", [1, 2], max_tokens=50))
    rank.loop.settle()
    rank.decide(VoteVerdict.RUN)
    for turn in range(STEPS_BETWEEN_VOTES):
        rank.turn()
        assert rank.core.num_begun + rank.worker.num_dummies == turn + 1
        assert len(rank.core.steps_in_flight) == 1
    assert rank.votes.cast_votes[-1] == Vote(0, 32, Want.RUN, 2)
    assert rank.tokens == expected_tokens([1, 2], STEPS_BETWEEN_VOTES - 1)
    while rank.loop.has_work():
        rank.turn()
    assert rank.tokens == expected_tokens([1, 2], STEPS_BETWEEN_VOTES), "the step in flight ends during the vote"
    assert rank.core.num_begun == STEPS_BETWEEN_VOTES, "but no other begins"
    rank.decide(VoteVerdict.RUN)
    for _ in range(STEPS_BETWEEN_VOTES):
        rank.turn()
    assert rank.tokens == expected_tokens([1, 2], 50)
    assert rank.core.num_begun + rank.worker.num_dummies == 2 * STEPS_BETWEEN_VOTES
    assert rank.votes.cast_votes[-1] == Vote(0, 64, Want.IDLE, 2)


def test_a_pause_with_overlapping_steps_is_complete_when_the_wave_has_ended() -> None:
    rank = Rank(overlaps=True)
    rank.core.add_request(make_request("a", [1, 2], max_tokens=50))
    rank.loop.settle()
    rank.decide(VoteVerdict.RUN)
    rank.turn()
    quiet = rank.core.pause("keep")
    for _ in range(STEPS_BETWEEN_VOTES - 1):
        rank.turn()
    assert not quiet.done()
    assert rank.votes.cast_votes[-1] == Vote(0, 32, Want.PAUSED, 2)
    rank.decide(VoteVerdict.REST)
    assert quiet.done()
    assert not rank.core.steps_in_flight
    assert rank.core.num_begun == 1
    assert rank.tokens == expected_tokens([1, 2], 1)
