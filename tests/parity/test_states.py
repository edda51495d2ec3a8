"""Models that keep a state between tokens, in float32: transformers' tokens, whatever the schedule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from tests.gpu_worker.speculation.mtp_checkpoint import OWN_HEADS, add_head
from tests.parity.engine import Engine
from tests.parity.state_checkpoints import SERVED, make_model, write_model
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.gpu_worker.speculation.lookup_proposers import NgramProposer

_LENGTHS = (5, 16, 64, 130, 200, 257, 1, 97)


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


class Reference:
    """Answers prompts with transformers' own ``generate``."""

    def __init__(self, kind: str, **entries: Any) -> None:
        self.model = make_model(kind, **entries)

    def answers(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return [self._answer(torch.tensor([prompt]), count) for prompt in prompts]

    def _answer(self, ids: Any, count: int) -> list[int]:
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


BUILT_IN = [
    "qwen3_next",
    "qwen3_5_text",
    "granitemoehybrid",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "kimi_linear",
]


class Served(NamedTuple):
    """A model, and what computes it."""

    kind: str
    impl: Literal["transformers", "native"]
    path: Path
    reference: Reference

    def engine(self, **settings: Any) -> Engine:
        return make_engine(self.path, **{"model_impl": self.impl, **settings})


@pytest.fixture(
    scope="module",
    params=[(kind, "transformers") for kind in SERVED] + [(kind, "native") for kind in BUILT_IN],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kind, impl = request.param
    return Served(kind, impl, write_model(kind, tmp_path_factory.mktemp(kind)), Reference(kind))


def make_engine(path: Path, **settings: Any) -> Engine:
    return Engine(path, **{"model_impl": "transformers", "num_blocks": 256, "prefix_caching": True, **settings})


def free_slots(engine: Engine) -> tuple[int, int]:
    """Return how many slots have no owner, and how many there are."""
    states = engine.core.scheduler.kv.states
    assert states is not None
    states.begin_step()  # gives back what the last step read
    return states.pool.num_free, states.pool.num_blocks


def test_batches_chunks_and_hits(served: Served) -> None:
    engine = served.engine(budget=68, max_num_seqs=4)
    prompts = [draw(length, seed) for seed, length in enumerate(_LENGTHS)]
    expected = served.reference.answers(prompts, 12)
    assert engine.generate(prompts, [12] * 8) == expected
    before = engine.stats.prefix_cache_hits
    assert engine.generate(prompts, [12] * 8) == expected
    assert engine.stats.prefix_cache_hits > before
    free, total = free_slots(engine)
    assert free == total


def test_turns_and_forks(served: Served) -> None:
    engine = served.engine(budget=160, max_num_seqs=8)
    turn = draw(70, seed=20)
    for index in range(3):
        [answer] = engine.generate([turn], [10])
        assert [answer] == served.reference.answers([turn], 10)
        turn = turn + answer + draw(23, seed=21 + index)
    shared = draw(192, seed=30)
    forks = [shared + draw(9 + index, seed=31 + index) for index in range(5)] + [shared] * 3
    assert engine.generate(forks, [10] * 8) == served.reference.answers(forks, 10)
    assert engine.generate(forks, [10] * 8) == served.reference.answers(forks, 10)


def test_preemption(served: Served) -> None:
    engine = served.engine(budget=128, max_num_seqs=6, num_blocks=34, max_model_len=256)
    prompts = [draw(length, seed=40 + length) for length in (100, 110, 120, 90, 80, 70)]
    assert engine.generate(prompts, [40] * 6) == served.reference.answers(prompts, 40)
    assert engine.stats.num_preemptions > 0


def test_another_engine_continues(served: Served) -> None:
    """As after the end of the first one: it has their tokens, and nothing else."""
    prompts = [draw(length, seed=50 + length) for length in (130, 7, 66)]
    expected = served.reference.answers(prompts, 20)
    begun = served.engine(budget=160).generate(prompts, [9, 1, 17])
    assert begun == [answer[:count] for answer, count in zip(expected, (9, 1, 17), strict=True)]
    assert served.engine(budget=68, max_num_seqs=2).generate(prompts, [20] * 3, begun) == expected


def propose_from(whole: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts be what follows in one of these sequences: all of them, or all but the last or the first one."""

    def propose(self: NgramProposer, step: Any, hidden: Any, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        proposed = {}
        for req_id, count in wanted.items():
            known = self._batch.known_tokens(req_id).tolist()
            tokens = next((each for each in whole if each[: len(known)] == known), known)
            drafts = tokens[len(known) : len(known) + count]
            if len(known) % 3 and drafts:
                drafts[-1 if len(known) % 3 == 1 else 0] ^= 1
            if drafts:
                proposed[req_id] = drafts
        return proposed

    monkeypatch.setattr(NgramProposer, "propose", propose)


def make_drafting(path: Path, method: Literal["ngram", "mtp"] = "ngram", **settings: Any) -> Engine:
    """Return an engine that drafts also on a busy machine, on which no draft looks as if it paid."""
    engine = make_engine(path, speculative=SpeculativeConfig(method, num_speculative_tokens=3), **settings)
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None
    return engine


def test_drafts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [draw(length, seed=60 + length) for length in (66, 9, 130)]
    expected = served.reference.answers(prompts, 30)
    propose_from([prompt + answer for prompt, answer in zip(prompts, expected, strict=True)], monkeypatch)
    engine = make_drafting(served.path, budget=160, max_num_seqs=4, model_impl=served.impl)
    assert engine.generate(prompts, [30] * 3) == expected
    counts = engine.stats.spec_decoding
    assert counts is not None
    assert 10 < counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kind", OWN_HEADS)
def test_drafts_of_its_own_head(
    kind: str, overlaps: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the tokens are those of an engine that drafts nothing. Overlapping steps are planned before it is
    known in which slot the state of a request lies."""
    # States of this size would be kept at each block, and a request be computed in every second step.
    monkeypatch.setattr("tokenloom.engine_core.kv_cache.kv_cache_size._is_small", lambda model: False)
    reference = Reference(kind, **OWN_HEADS[kind])
    for name, parameter in reference.model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.mul_(0.01)  # so that a head which reads the last token alone is often right
    reference.model.lm_head.weight.mul_(20)  # and sure of it
    reference.model.save_pretrained(tmp_path)
    add_head(tmp_path, reference.model, is_sharp=True)
    settings: dict[str, Any] = {"budget": 160, "max_num_seqs": 4, "model_impl": "native", "dtype": dtype}
    prompts = [draw(length, seed=60 + length) for length in (66, 9, 130)]
    plain = make_engine(tmp_path, **settings).generate(prompts, [30] * 3)
    if dtype == "float32":
        assert plain == reference.answers(prompts, 30)
    engine = make_drafting(tmp_path, "mtp", **settings, async_scheduling=overlaps)
    assert engine.core.executor.max_concurrent_batches == 1 + overlaps
    assert engine.core.scheduler.drafts is not None
    assert engine.core.scheduler.drafts.defers == overlaps
    for _ in range(2):  # the second time the prompts' beginnings are found
        assert engine.generate(prompts, [30] * 3) == plain
    counts = engine.stats.spec_decoding
    assert counts is not None
    assert counts.num_accepted_tokens > (20 if overlaps else 40)
    assert engine.stats.prefix_cache_hits > 0


def test_a_model_that_keeps_a_state_does_not_draft(tmp_path: Path) -> None:
    path = write_model("lfm2", tmp_path)
    with pytest.raises(ValueError, match=r"speculative_config\.model: layers of .* keep a state between tokens"):
        make_engine(path, model_impl="native", speculative=SpeculativeConfig("draft_model", 3, str(path)))
