"""A hundred turns of an agent over models that keep a state: each finds the beginning that it shares with an earlier
one, and the tokens are those of an engine without a cache."""

from pathlib import Path

import pytest

from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import draw

TURNS = 100
SPEAKS_EVERY = 10
"""Turns after which the user speaks, and the template drops what the model thought since the last time."""
ANSWER, THOUGHT = 6, 4
"""Tokens of an answer, and those of them that are its thinking."""
BLOCK = 16


class Talk:
    """Holds the prompt of an agent's next turn, and what of it an earlier turn has had."""

    def __init__(self) -> None:
        self.prompt = draw(200, seed=1)
        self.whole: list[list[int]] = []
        """The prompts of the turns so far."""
        self._spoken = len(self.prompt)  # tokens up to the user's last message

    def answered(self, answer: list[int]) -> None:
        """Go on after an answer: with the result of a tool, or with the user's next message."""
        self.whole.append(self.prompt)
        turn = len(self.whole)
        self.prompt = self.prompt + answer + draw(3 + 7 * turn % 20, seed=100 + turn)
        if turn % SPEAKS_EVERY == 0:
            rest = self.prompt[self._spoken :]
            self.prompt = self.prompt[: self._spoken] + rest[THOUGHT:]
            self._spoken = len(self.prompt)

    @property
    def shared(self) -> int:
        """Tokens up to the last end of an earlier prompt with which this one begins, in whole blocks."""
        ends = [len(each) for each in self.whole if self.prompt[: len(each)] == each]
        return (max(ends) - 1) // BLOCK * BLOCK if ends else 0


def converse(engine: Engine) -> tuple[Talk, list[list[int]], list[int], list[int]]:
    """Return the conversation, its answers, the tokens that each turn found in the cache, and those that it shares."""
    talk, answers, hits, shared = Talk(), list[list[int]](), list[int](), list[int]()
    for _ in range(TURNS):
        before = engine.stats.prefix_cache_hits
        shared.append(talk.shared)
        [answer] = engine.generate([talk.prompt], [ANSWER])
        hits.append(engine.stats.prefix_cache_hits - before)
        answers.append(answer)
        talk.answered(answer)
    return talk, answers, hits, shared


def make_engine(path: Path, *, caches: bool, memory: int | None = None) -> Engine:
    return Engine(
        path, num_blocks=600, prefix_caching=caches, max_model_len=4096, max_num_seqs=8, state_memory_bytes=memory
    )


def test_the_states_of_default_memory_are_enough(tmp_path: Path) -> None:
    """The user speaks every tenth turn, and there are 16 slots: what a turn has demoted is still there ten turns on."""
    engine = make_engine(write_model("qwen3_5_text", tmp_path), caches=True)
    assert engine.core.scheduler.kv.states is not None
    assert engine.core.scheduler.kv.states.pool.num_blocks == 16
    talk, _, hits, _ = converse(engine)
    assert sum(hits) / sum(map(len, talk.whole)) >= 0.95


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "kimi_linear"])
def test_each_turn_finds_the_one_before(kind: str, tmp_path: Path) -> None:
    path = write_model(kind, tmp_path / kind)
    engine = make_engine(path, caches=True, memory=16 << 20)  # of all states of the conversation
    talk, answers, hits, shared = converse(engine)
    assert all(found >= least for found, least in zip(hits, shared, strict=True))
    assert engine.core.scheduler.kv.states is not None
    assert engine.core.scheduler.kv.states.num_kept > 0.9 * TURNS  # some turns end in the same block
    assert make_engine(path, caches=False).generate(talk.whole, [ANSWER] * TURNS) == answers
    share = sum(hits) / sum(map(len, talk.whole))
    assert share >= 0.95
    plain, _, of_attention, _ = converse(
        make_engine(save_random("qwen3", tmp_path, max_position_embeddings=4096, vocab_size=512), caches=True)
    )
    assert list(map(len, plain.whole)) == list(map(len, talk.whole))
    assert share >= sum(of_attention) / sum(map(len, plain.whole)) - 0.03
