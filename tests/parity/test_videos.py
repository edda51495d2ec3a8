"""Prompts with videos get the tokens of transformers' whole classes, however the work is batched, cut or interrupted,
with rows from transformers' towers of what its own video processors make of the frames."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import frame_prompts
from tests.checkpoints.frame_prompts import FrameModel
from tests.checkpoints.video_prompts import KINDS, MARK, Shown, VideoModel, trained_positions
from tests.checkpoints.vision_prompts import UNWRITTEN, VisionPrompt
from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.towers.video_files import shades
from tests.parity.identical import assert_identical
from tests.parity.images import NUM_TOKENS, ImageEngine, ImageReference
from tests.parity.vision_checkpoints import load_vision
from tokenloom import LLM, SamplingParams
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.checkpoint.files.text_part import media_switches

MARKS = dict.fromkeys(KINDS, MARK) | frame_prompts.MARKS
ENTRIES: dict[str, Any] = {"vision_config": {"tokens_per_second": 2}}
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # of this process, which removes them at its end


def shown(count: int, width: int, height: int, seed: int = 0, rate: float = 10.0) -> Shown:
    return Shown(np.stack(shades(count, width, height, seed)), rate)


SHORT = shown(23, 200, 180)
LONG = shown(60, 60, 60)
_PROMPTS: list[tuple[list[Shown], str]] = [
    ([SHORT], "What happens?"),
    ([SHORT, shown(9, 120, 200, 1, 4.0)], "And in these two?"),
    ([shown(23, 200, 180, 2)], "What happens now?"),
    ([SHORT], "Why?"),
    ([], "Hello there."),
]
"""The fourth asks about the video of the first; that of the third has the same size, so that both begin alike. Their
times end within their lines and columns, where transformers computes what the models were trained with."""


@functools.cache
def model_of(kind: str) -> VideoModel | FrameModel:
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="videos-"))
    entries = ENTRIES if kind == "qwen2_5_vl" else {}
    path = write_whole_vision(kind, Path(_FOLDERS[-1].name), **entries)
    return (FrameModel if kind in frame_prompts.KINDS else VideoModel)(kind, path, load_vision(path))


def reference_of(model: VideoModel | FrameModel, prompts: list[VisionPrompt]) -> ImageReference:
    media = media_switches(json.loads((model.path / "config.json").read_text()))
    assert media is not None
    cases = [model.generate(each, NUM_TOKENS) for each in prompts]
    return ImageReference(model.kind, model.path, prompts, cases, media)


@functools.cache
def video_reference(kind: str) -> ImageReference:
    model = model_of(kind)
    return reference_of(model, [model.prompt(videos, text) for videos, text in _PROMPTS])


@pytest.fixture(params=MARKS)
def reference(request: pytest.FixtureRequest) -> ImageReference:
    return video_reference(request.param)


def check(reference: ImageReference, engine: ImageEngine) -> None:
    assert_identical(reference.cases, engine.generate)


def test_at_once_and_again_over_the_prefix_cache(reference: ImageReference) -> None:
    """Where the prefix cache has a video, its rows are not asked for again."""
    engine = ImageEngine(reference, prefix_caching=True, num_blocks=900)
    check(reference, engine)
    asked, hits = engine.num_asked, engine.stats.prefix_cache_hits
    check(reference, engine)
    assert engine.stats.prefix_cache_hits > hits
    assert engine.num_asked - asked <= 2 < asked  # of videos that end in blocks that are not full
    assert len({tuple(case.tokens) for case in reference.cases}) >= 4, "its tokens change with the video"


def test_chunks_that_cut_videos(reference: ImageReference) -> None:
    budget = 24 if reference.media.seen_whole is None else 60  # a frame whose tokens see each other is not cut
    check(reference, ImageEngine(reference, budget=budget, max_num_seqs=8, num_blocks=900))


@pytest.mark.parametrize("kind", [kind for kind in MARKS if kind != "gemma4_e2b"])
def test_preemption(kind: str) -> None:
    """Of Gemma 4 only the larger model: the windows of the smaller one give back so many blocks that all fit."""
    reference = video_reference(kind)
    num_groups = ImageEngine(reference, num_blocks=900).core.ready.num_kv_groups
    blocks = (-(-reference.longest // 16) + 1) * num_groups
    options = {"budget": max(96, reference.longest // 2), "max_num_seqs": 8, "max_model_len": reference.longest}
    engine = ImageEngine(reference, num_blocks=blocks, **options)
    check(reference, engine)
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("kind", "control"),
    [
        ("qwen2_5_vl", "one_key"),
        ("qwen2_5_vl", "without_times"),
        ("smolvlm", "one_key"),
        ("gemma4_26b_a4b", "causal"),
        *((kind, "without_grid") for kind in KINDS),
    ],
)
def test_what_is_left_out_is_noticed(kind: str, control: str) -> None:
    reference = video_reference(kind)
    engine = ImageEngine(reference, prefix_caching=True, num_blocks=900, **{control: True})
    found = [engine.generate([case.prompt], [len(case.tokens)])[0] for case in reference.cases]
    different = sum(tokens != case.tokens for tokens, case in zip(found, reference.cases, strict=True))
    assert different >= 1
    assert found[-1] == reference.cases[-1].tokens  # the prompt without videos


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_long_video_has_its_times_as_the_models_were_trained(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text behind it goes on after its last frame, also where that is beyond its lines and columns."""
    model = model_of(kind)
    prompts = [model.prompt([LONG], "What happens?"), model.prompt([LONG, LONG], "And now?", fps=4)]
    body = model.model.model
    monkeypatch.setattr(body, "get_rope_index", trained_positions(model.model))
    reference = reference_of(model, prompts)
    (first, *_) = prompts[0].pictures
    frames, lines, columns = first.grid
    assert (frames - 1) * first.frame_step + 1 > max(lines, columns)
    check(reference, ImageEngine(reference, prefix_caching=True, num_blocks=900))
    check(reference, ImageEngine(reference, budget=24, max_num_seqs=8, num_blocks=900))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma4_e2b"])
def test_drafts_of_the_prompt(kind: str) -> None:
    speculative = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    engine = ImageEngine(video_reference(kind), speculative=speculative, num_blocks=900)
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine, on which no draft looks as if it paid
    check(video_reference(kind), engine)
    assert engine.num_accepted > 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = ImageEngine(
        video_reference(kind), executor=executor, parallel=parallel(2, 1, 1), budget=64, num_blocks=400
    )
    check(video_reference(kind), engine)
    engine.core.shutdown()


@pytest.mark.parametrize("kind", MARKS)
def test_prompts_of_callers(kind: str) -> None:
    """Frames to tokens: what is chosen, scaled and cut of a video, its rows and what stands for it are our own."""
    model = model_of(kind)
    videos = [SHORT, shown(23, 200, 180, 2), shown(9, 120, 200, 1, 4.0)]
    cases = [model.generate(model.prompt([video], "What happens?"), 12) for video in videos]
    llm = LLM(str(model.path), dtype="float32", num_gpu_blocks_override=900, num_threads=1)
    prompts = [
        {
            "prompt": f"<s>Look: {MARKS[kind]} What happens?",
            "multi_modal_data": {"video": (video.frames, {"fps": video.rate})},
        }
        for video in videos
    ]
    bias = dict.fromkeys(UNWRITTEN, -100.0) if kind.startswith("gemma4") else None
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias=bias)
    for _ in range(2):  # the second time most of each prompt is in the prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(cases)
        assert [output.prompt_token_ids for output in outputs] == [case.prompt for case in cases]
        assert [output.outputs[0].token_ids for output in outputs] == [case.tokens for case in cases]
    assert kind == "qwen3_5" or len({tuple(case.tokens) for case in cases}) > 1, "whose first tokens are alike"
    assert np.abs(cases[0].logits - cases[1].logits).max() > 0.1, "other frames of the same size change the output"
    llm.close()
