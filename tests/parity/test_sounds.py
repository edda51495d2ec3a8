"""Prompts with sounds get the tokens of transformers' whole Qwen2-Audio, however the work is batched, cut or
interrupted, with rows from transformers' tower."""

from pathlib import Path

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.identical import assert_identical
from tests.parity.images import ImageEngine
from tests.parity.sounds import sound_reference
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig, WorkerConfig
from tokenloom.engine_core.data.model_info import MediaTraits
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.devices import make_worker


def check(engine: ImageEngine) -> None:
    assert_identical(sound_reference().cases, engine.generate)


def test_at_once_and_again_over_the_prefix_cache() -> None:
    """Where the prefix cache has a sound, its rows are not asked for again."""
    engine = ImageEngine(sound_reference(), prefix_caching=True, num_blocks=600)
    check(engine)
    asked, hits = engine.num_asked, engine.stats.prefix_cache_hits
    check(engine)
    assert engine.stats.prefix_cache_hits > hits
    assert engine.num_asked - asked <= 2 < asked  # of sounds that end in blocks that are not full


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_chunks_that_cut_sounds(backend: str) -> None:
    check(ImageEngine(sound_reference(), budget=24, max_num_seqs=8, num_blocks=600, attention_backend=backend))


def test_preemption() -> None:
    reference = sound_reference()
    blocks = -(-reference.longest // 16) + 1
    options = {"budget": max(96, reference.longest // 2), "max_num_seqs": 8, "max_model_len": reference.longest}
    engine = ImageEngine(reference, num_blocks=blocks, **options)
    check(engine)
    assert engine.stats.num_preemptions > 0


def test_two_sounds_of_one_key_are_noticed() -> None:
    reference = sound_reference()
    engine = ImageEngine(reference, prefix_caching=True, num_blocks=600, one_key=True)
    found = [engine.generate([case.prompt], [len(case.tokens)])[0] for case in reference.cases]
    assert found[4] != reference.cases[4].tokens, "it got the keys and values of the first one's sound"
    assert found[-1] == reference.cases[-1].tokens  # the prompt without sounds


def test_tokens_depend_on_the_sound() -> None:
    first, other = sound_reference().cases[0], sound_reference().cases[4]
    end = max(sound_reference().prompts[0].pictures[0].places)
    assert end > 60
    assert first.prompt[:end] == other.prompt[:end], "ids say nothing of which sound it is"
    assert first.tokens != other.tokens


def test_keys_and_values_of_8_bits() -> None:
    """Tokens do not depend on how the work is cut, as far as rounding to 8 bits lets them."""
    reference = sound_reference()
    prompts, limits = [case.prompt for case in reference.cases], [24] * len(reference.cases)
    alone = ImageEngine(reference, kv_cache_dtype="int8", max_num_seqs=1, num_blocks=600)
    expected = alone.generate(prompts, limits)
    cut = ImageEngine(reference, kv_cache_dtype="int8", budget=24, max_num_seqs=8, num_blocks=600)
    found = cut.generate(prompts, limits)
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(prompts) - 1
    exact = sum(tokens[:4] == case.tokens[:4] for tokens, case in zip(expected, reference.cases, strict=True))
    assert exact >= len(prompts) - 1


def test_drafts_of_the_prompt() -> None:
    speculative = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    engine = ImageEngine(sound_reference(), speculative=speculative, num_blocks=600)
    check(engine)
    assert engine.num_accepted > 0


def test_two_ranks(tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = ImageEngine(sound_reference(), executor=executor, parallel=parallel(2, 1, 1), budget=64, num_blocks=300)
    check(engine)
    engine.core.shutdown()


def test_text_alone_has_no_sounds() -> None:
    def traits(*, text_only: bool) -> MediaTraits | None:
        worker = WorkerConfig(model=str(sound_reference().path), num_threads=1, language_model_only=text_only)
        return make_worker(EngineConfig(worker=worker)).load_model().media

    assert traits(text_only=False) == MediaTraits(("audio",))
    assert traits(text_only=True) is None
    case = sound_reference().cases[-1]
    engine = ImageEngine(sound_reference(), language_model_only=True, num_blocks=600)
    assert_identical([case], engine.generate)
