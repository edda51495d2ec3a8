"""A hundred turns of an agent over models that keep a state: each finds the beginning that it shares with an earlier
one. The tokens are those of an engine without a cache, whether or not drafts are verified, engines are killed within an
answer, or one engine computes prompts and another one decodes."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpu_worker.kv_connector.engine_pair import MAKE, Pair
from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import draw, propose_from
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams

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


class Turns(NamedTuple):
    """What became of a conversation."""

    talk: Talk
    answers: list[list[int]]
    hits: list[int]
    """Tokens that each turn found in the cache."""
    shared: list[int]
    """Tokens that each turn shares with an earlier one."""

    @property
    def share(self) -> float:
        """The share of all tokens of prompts that were found."""
        return sum(self.hits) / sum(map(len, self.talk.whole))


def converse(ask: Callable[[list[int]], list[int]], count_hits: Callable[[], int]) -> Turns:
    turns = Turns(Talk(), [], [], [])
    for _ in range(TURNS):
        before = count_hits()
        turns.shared.append(turns.talk.shared)
        answer = ask(turns.talk.prompt)
        turns.hits.append(count_hits() - before)
        turns.answers.append(answer)
        turns.talk.answered(answer)
    return turns


def converse_with(engine: Engine) -> Turns:
    return converse(lambda prompt: engine.generate([prompt], [ANSWER])[0], lambda: engine.stats.prefix_cache_hits)


def make_engine(path: Path, *, caches: bool, memory: int | None = None, drafts: bool = False) -> Engine:
    engine = Engine(
        path,
        num_blocks=600,
        prefix_caching=caches,
        max_model_len=4096,
        max_num_seqs=8,
        state_memory_bytes=memory,
        speculative=SpeculativeConfig("ngram", 3) if drafts else None,
    )
    draft_always(engine.core)
    return engine


def draft_always(core: EngineCore) -> None:
    """Draft also on a busy machine, on which no draft looks as if it paid."""
    if core.scheduler.drafts is not None:
        core.scheduler.drafts.free_rows = core.scheduler.drafts.costs = None


def test_the_states_of_default_memory_are_enough(tmp_path: Path) -> None:
    """The user speaks every tenth turn, and there are 16 slots: what a turn has demoted is still there ten turns on."""
    engine = make_engine(write_model("qwen3_5_text", tmp_path), caches=True)
    assert engine.core.scheduler.kv.states is not None
    assert engine.core.scheduler.kv.states.pool.num_blocks == 16
    assert converse_with(engine).share >= 0.95


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "kimi_linear"])
def test_each_turn_finds_the_one_before(kind: str, tmp_path: Path) -> None:
    path = write_model(kind, tmp_path / kind)
    engine = make_engine(path, caches=True, memory=16 << 20)  # of all states of the conversation
    found = converse_with(engine)
    assert all(hits >= least for hits, least in zip(found.hits, found.shared, strict=True))
    assert engine.core.scheduler.kv.states is not None
    assert engine.core.scheduler.kv.states.num_kept > 0.9 * TURNS  # some turns end in the same block
    assert make_engine(path, caches=False).generate(found.talk.whole, [ANSWER] * TURNS) == found.answers
    assert found.share >= 0.95
    plain = converse_with(
        make_engine(save_random("qwen3", tmp_path, max_position_embeddings=4096, vocab_size=512), caches=True)
    )
    assert list(map(len, plain.talk.whole)) == list(map(len, found.talk.whole))
    assert found.share >= plain.share - 0.03


class Killed:
    """Answers turns with an engine, or with one that computes prompts and one that decodes, and kills them within the
    answers of some turns: others, which know nothing, continue those."""

    def __init__(self, path: Path, *, drafts: bool, kills: bool, apart: bool) -> None:
        self._path, self._drafts, self._apart = path, drafts, apart
        self._killed = (31, 62, 93) if kills else ()
        self._numbers, self._before = itertools.count(), 0
        self.accepted = 0
        """Drafts that were right."""
        self._begin()

    def ask(self, prompt: list[int]) -> list[int]:
        number = next(self._numbers)
        if number not in self._killed:
            return self._answer(number, prompt, ANSWER)
        half = self._answer(number, prompt, ANSWER // 2)
        assert len(half) == ANSWER // 2
        self.end()
        self._begin()
        return self._continued.generate([prompt], [ANSWER], [half])[0]

    def hits(self) -> int:
        return self._before + sum(core.scheduler.stats().prefix_cache_hits for core in self._cores)

    def end(self) -> None:
        self._before = self.hits()
        for core in (*self._cores, *([self._pair.decode.core] if self._pair else [])):
            counts = core.scheduler.stats().spec_decoding
            self.accepted += counts.num_accepted_tokens if counts else 0
        if self._pair is not None:
            self._pair.close()

    def _begin(self) -> None:
        self._continued = make_engine(self._path, caches=True, memory=16 << 20, drafts=self._drafts)
        self._pair: Pair | None = None
        if self._apart:
            speculative = SpeculativeConfig("ngram", 3) if self._drafts else None
            self._pair = Pair(MAKE["shm"], model=str(self._path), num_blocks=600, speculative=speculative)
            draft_always(self._pair.decode.core)
        # The engines that find the beginnings of prompts, and decide by that what is computed.
        self._cores = [self._continued.core if self._pair is None else self._pair.prefill.core]

    def _answer(self, number: int, prompt: list[int], count: int) -> list[int]:
        if self._pair is None:
            return self._continued.generate([prompt], [count])[0]
        params = CoreSamplingParams(max_tokens=count, seed=0, temperature=0.0)
        return self._pair.ask(f"r{number}", prompt, params)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Turns]:
    path = write_model("qwen3_5_text", tmp_path_factory.mktemp("model"))
    return path, converse_with(make_engine(path, caches=False))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_those_without_a_cache(
    known: tuple[Path, Turns], drafts: bool, kills: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cold = known
    whole = [prompt + answer for prompt, answer in zip(cold.talk.whole, cold.answers, strict=True)]
    propose_from(whole, monkeypatch)
    engines = Killed(path, drafts=drafts, kills=kills, apart=apart)
    found = converse(engines.ask, engines.hits)
    engines.end()
    assert found.answers == cold.answers
    assert (engines.accepted > TURNS) == drafts
    # A kill costs one prompt, of a hundred.
    assert found.share >= (0.9 if kills else 0.95)
