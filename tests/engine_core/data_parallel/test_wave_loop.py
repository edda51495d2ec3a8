"""A core in the waves of its group, without processes."""

import msgspec
import pytest

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_config, make_request
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.messages import EngineCoreOutputs
from tokenloom.engine_core.data.parallel_config import ExpertPeers
from tokenloom.engine_core.data_parallel.messages import (
    Called,
    Lost,
    Outcome,
    Roster,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
)
from tokenloom.engine_core.data_parallel.wave_loop import STEPS_BETWEEN_VOTES, WaveLoop, WaveState
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


class Votes:
    """Keeps what is cast."""

    def __init__(self) -> None:
        self.cast_votes: list[Vote] = []

        self.complaints: list[int] = []

    def cast(self, vote: Vote) -> None:
        self.cast_votes.append(vote)

    def complain(self, epoch: int) -> None:
        self.complaints.append(epoch)

    def key_of(self, roster: Roster) -> bytes:
        return roster.nonce

    def listen_again(self) -> None: ...


class CountingWorker(HashWorker):
    """Counts dummy batches, and notes the workers that it joins, which it may not reach."""

    num_dummies = 0
    joined: ExpertPeers | None = None
    has_left = False
    lacks_peer = False

    def execute_dummy_batch(self) -> None:
        super().execute_dummy_batch()
        self.num_dummies += 1

    def join_experts(self, peers: ExpertPeers) -> None:
        if self.lacks_peer:
            raise PeerLostError("a worker has ended")
        self.joined = peers

    def leave_experts(self) -> None:
        self.has_left = True


class Rank:
    """A core over the hash worker with experts, as rank 1 of 2."""

    def __init__(self, *, overlaps: bool = False, enable_expert_parallel: bool = False) -> None:
        config = make_config(num_blocks=20, async_scheduling=overlaps)
        parallel = ParallelConfig(
            data_parallel_size=2, data_parallel_rank=1, enable_expert_parallel=enable_expert_parallel
        )
        config = msgspec.structs.replace(config, parallel=parallel)
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


def roster(epoch: int, *ranks: int) -> Roster:
    return Roster(epoch, [*ranks], [[f"127.0.0.1:{9000 + rank}"] for rank in ranks], b"nonce")


def test_workers_with_spread_experts_join_those_of_a_group_of_another_size() -> None:
    rank = Rank(enable_expert_parallel=True)
    rank.loop.resize(3)
    vote = rank.votes.cast_votes[-1]
    assert vote.target == 3
    rank.loop.take(Outcome(vote.wave, vote.step, VoteVerdict.REST, 3, roster(2, 0, 1, 2)))
    assert rank.worker.joined == ExpertPeers(1, roster(2, 0, 1, 2).workers, 2, b"nonce")
    rank.loop.resize(1)
    vote = rank.votes.cast_votes[-1]
    rank.loop.take(Outcome(vote.wave, vote.step, VoteVerdict.REST, 1))
    assert rank.worker.has_left
    assert rank.loop.waves.state is WaveState.REMOVED


def test_after_a_loss_the_rank_begins_a_wave_with_those_that_are_left() -> None:
    rank = Rank(enable_expert_parallel=True)
    rank.core.add_request(make_request("a", [1, 2], max_tokens=3))
    rank.loop.settle()
    rank.decide(VoteVerdict.RUN)
    rank.turn()
    rank.loop.take(Lost(4, 2, roster(2, 1)))
    assert rank.worker.joined == ExpertPeers(0, [["127.0.0.1:9001"]], 2, b"nonce")
    assert rank.votes.cast_votes[-1] == Vote(4, 0, Want.RUN, 2)
    rank.decide(VoteVerdict.RUN)
    while rank.core.has_requests():
        rank.turn()
    assert rank.tokens == expected_tokens([1, 2], 3)[-3:]


def test_a_rank_that_cannot_reach_another_one_says_so_and_waits() -> None:
    rank = Rank(enable_expert_parallel=True)
    rank.core.add_request(make_request("a", [1, 2], max_tokens=3))
    rank.worker.lacks_peer = True
    rank.loop.take(Lost(1, 2, roster(2, 0, 1)))
    assert rank.votes.complaints == [2]
    assert rank.loop.waves.state is WaveState.LOST
    vote = rank.votes.cast_votes[-1]
    rank.loop.take(Outcome(vote.wave, vote.step, VoteVerdict.RUN, 3, roster(3, 0, 1, 2)))
    assert rank.votes.complaints == [2, 3], "the hub ignores what was said of earlier members"
    while rank.loop.has_work():
        rank.turn()
    assert not rank.tokens
    rank.worker.lacks_peer = False
    rank.loop.take(Lost(2, 3, roster(4, 0, 1, 2)))
    assert rank.votes.cast_votes[-1].wave == 2


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


def test_the_loss_of_a_step_that_began_with_earlier_members_is_no_loss_of_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(overlaps=True, enable_expert_parallel=True)
    rank.core.add_request(make_request("a", [1, 2], max_tokens=5))
    rank.loop.settle()
    rank.decide(VoteVerdict.RUN)
    rank.turn()
    assert len(rank.core.steps_in_flight) == 1

    def lose(*_: object) -> None:
        raise PeerLostError("a worker has ended")

    def step() -> EngineCoreOutputs | None:
        try:
            return rank.core.step()
        except PeerLostError as error:
            rank.loop.lost_peer(error)
            return None

    with monkeypatch.context() as patch:
        patch.setattr(rank.worker, "execute_model", lose)
        rank.loop.take(Lost(4, 2, roster(2, 0, 1)))  # another rank has noticed the loss first
        rank.loop.turn(step, rank.worker.execute_dummy_batch)
    assert not rank.votes.complaints
    assert rank.votes.cast_votes[-1] == Vote(4, 0, Want.RUN, 2)
    rank.decide(VoteVerdict.RUN)
    while rank.core.has_requests():
        rank.turn()
    assert rank.tokens == expected_tokens([1, 2], 5)
    with monkeypatch.context() as patch:
        patch.setattr(rank.worker, "execute_dummy_batch", lose)
        with pytest.raises(PeerLostError) as lost:
            rank.turn()
    rank.loop.lost_peer(lost.value)
    assert rank.votes.complaints == [2], "the present members have lost one"
