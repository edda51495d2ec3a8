"""A trainer gives weights to the engine of its program; outputs say which weights computed them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from tokenloom.engine_core.data.errors import EnginePausedError, UtilityError
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline import tensor_file as own
from tokenloom.offline.tensor_file import PIECE_BYTES, tensor_file

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
STORY = "Once upon a time"
MODEL = str(DEMO_MODEL)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def demo() -> Tensors:
    return load_file(DEMO_MODEL / "model.safetensors")


@pytest.fixture(scope="module")
def other(demo: Tensors) -> Tensors:
    """Weights that say something different."""
    return {**demo, "model.norm.weight": -demo["model.norm.weight"]}


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> Iterator[LLM]:
    made = make_llm(max_num_seqs=4, num_gpu_blocks_override=64)
    yield made
    made.close()


def say(llm: LLM) -> RequestOutput:
    (output,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    return output


def folders() -> set[Path]:
    return set(own._SHARED_MEMORY.glob(f"{own._PREFIX}*"))


def test_tensors_become_the_weights(llm: LLM, demo: Tensors, other: Tensors, tmp_path: Path) -> None:
    before, known = say(llm), folders()
    number = before.weights_versions[-1]
    assert llm.update_weights(other) == number + 1
    changed = say(llm)
    assert changed.outputs[0].token_ids != before.outputs[0].token_ids
    assert (changed.num_cached_tokens, changed.weights_versions) == (0, (number + 1,))
    (folder,) = folders() - known
    for _ in range(4):
        llm.update_weights(demo)
    assert len(list(folder.iterdir())) <= 2, "old weights take no memory"
    assert say(llm).outputs == before.outputs
    llm.sleep(1)
    llm.wake_up()  # reads the given weights again
    assert say(llm).outputs == before.outputs
    llm.reload_weights()
    assert folders() == known
    assert say(llm).outputs == before.outputs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda all: all.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda all: all.update(more=torch.zeros(1)), "has more"),
        (lambda all: all.update({"model.norm.weight": torch.zeros(7).bfloat16()}), r"is BF16 \[7\], and the loaded"),
        (lambda all: all.update({"model.norm.weight": torch.zeros(256)}), r"is F32 \[256\], and the loaded"),
        (lambda all: all.update({"model.norm.weight": torch.zeros(256, dtype=torch.complex64)}), "complex64"),
    ],
)
def test_what_does_not_fit_leaves_the_old_weights(
    llm: LLM, other: Tensors, change: Callable[[Tensors], object], words: str
) -> None:
    before, known = say(llm), folders()
    wrong = dict(other)
    change(wrong)
    with pytest.raises(ValueError, match=words):
        llm.update_weights(wrong)
    assert say(llm).outputs == before.outputs
    assert folders() == known


def test_running_requests_need_a_mode(llm: LLM, demo: Tensors, other: Tensors) -> None:
    engine = llm.llm_engine
    engine.add_request("a", STORY, LONG)
    engine.step()
    with pytest.raises(UtilityError, match="pause the engine"):
        engine.update_weights(other)
    number = engine.update_weights(other, mode="keep")
    assert not engine.is_paused()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert isinstance(outputs[-1], RequestOutput)
    assert outputs[-1].weights_versions == (number - 1, number)
    assert len(outputs[-1].outputs[0].token_ids) == 200
    engine.pause_generation("keep")
    with pytest.raises(EnginePausedError):
        say(llm)
    assert engine.update_weights(demo, mode="wait") == number + 1
    assert engine.is_paused(), "a pause of the caller goes on"
    engine.resume_generation()


async def test_modes_of_the_async_engine(demo: Tensors, other: Tensors) -> None:
    async with AsyncLLM(EngineArgs(MODEL, dtype="float32", max_num_seqs=8, num_gpu_blocks_override=200)) as llm:

        async def ask(params: SamplingParams, begun: asyncio.Event | None = None) -> RequestOutput:
            async for output in llm.generate(STORY, params):
                last = output
                if begun is not None:
                    begun.set()
            return last

        old = await ask(LONG)
        ends = {"wait": "length", "abort": "abort", "keep": "length"}
        for number, (mode, reason) in enumerate(ends.items(), 1):
            begun = asyncio.Event()
            asked = asyncio.create_task(ask(LONG, begun))
            await begun.wait()
            assert await llm.update_weights(demo, mode=mode) == number
            ended = await asked
            assert ended.outputs[0].finish_reason == reason
            # The weights are the same, so what ran goes on as if nothing had happened.
            tokens = ended.outputs[0].token_ids
            assert tokens == old.outputs[0].token_ids[: len(tokens)]
            assert ended.weights_versions == ((number - 1, number) if mode == "keep" else (number - 1,))
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        with pytest.raises(EnginePausedError):
            await ask(GREEDY)
        await llm.update_weights(other)
        await llm.resume_generation()
        new = await ask(GREEDY)
        assert new.weights_versions == (4,)
        assert new.outputs[0].token_ids != old.outputs[0].token_ids[:12]


def test_log_probabilities_are_those_of_a_recompute_bit_by_bit(demo: Tensors) -> None:
    """Of a batch-invariant engine: a trainer that recomputes them in the same forms has ratios of exactly 1."""
    llm = LLM(MODEL, dtype="float32", batch_invariant=True, num_gpu_blocks_override=200)
    try:
        llm.update_weights({name: tensor * 1.01 for name, tensor in demo.items()})
        params = SamplingParams(n=3, temperature=1.0, max_tokens=30, logprobs=0, seed=3, ignore_eos=True)
        drawn = llm.generate([STORY, "Tom", "The dog and the cat"], params, use_tqdm=False)
        for output in drawn:
            for sample in output.outputs:
                ids = [*output.prompt_token_ids, *sample.token_ids]
                whole = {"prompt_token_ids": ids}
                again = SamplingParams(max_tokens=1, prompt_logprobs=0)
                (recomputed,) = llm.generate([whole], again, use_tqdm=False)
                assert recomputed.prompt_logprobs is not None
                assert sample.logprobs is not None
                rest = recomputed.prompt_logprobs[-len(sample.token_ids) :]
                first = [each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs, strict=True)]
                second = [each[token].logprob for token, each in zip(sample.token_ids, rest, strict=True) if each]
                assert first == second
    finally:
        llm.close()


def test_a_file_is_written_in_pieces(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(3, dtype=torch.int8), "c": torch.zeros(0, 4)}
    tensors["large"] = torch.randn(PIECE_BYTES // 4 + 3)
    pieces = list(tensor_file(tensors))
    assert max(map(len, pieces)) <= PIECE_BYTES
    (tmp_path / "x").write_bytes(b"".join(pieces))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "y")
    ours, theirs = load_file(tmp_path / "x"), load_file(tmp_path / "y")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_folder_of_a_killed_program_is_removed_by_the_next(demo: Tensors) -> None:
    code = f"""
import time
from pathlib import Path
from tokenloom.offline.tensor_file import OwnWeights
kept = OwnWeights(Path({MODEL!r}))
print(kept._staged._folder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        mine = own.OwnWeights(DEMO_MODEL)
        assert folder.is_dir(), "its process lives"
        os.kill(process.pid, signal.SIGKILL)
    mine.close()
    own.OwnWeights(DEMO_MODEL).close()
    assert not folder.exists()


def test_each_of_several_workers_takes_its_part_or_none_does(
    make_llm: Callable[..., LLM], demo: Tensors, other: Tensors
) -> None:
    one = make_llm(max_num_seqs=4, num_gpu_blocks_override=64)
    two = make_llm(max_num_seqs=4, num_gpu_blocks_override=64, tensor_parallel_size=2)
    before = say(two)
    assert before.outputs[0].token_ids == say(one).outputs[0].token_ids
    with pytest.raises(ValueError, match=r"lacks model.norm.weight"):
        two.update_weights({name: tensor for name, tensor in other.items() if name != "model.norm.weight"})
    assert say(two).outputs == before.outputs
    assert two.update_weights(other) == one.update_weights(other) == 1
    changed = say(two).outputs[0].token_ids
    assert changed == say(one).outputs[0].token_ids != before.outputs[0].token_ids
