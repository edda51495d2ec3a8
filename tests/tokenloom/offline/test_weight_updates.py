"""A trainer gives weights to the engine of its program; outputs say which weights computed them."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tokenloom import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.errors import EnginePausedError, UtilityError
from tokenloom.model_files import staged_weights
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline import tensor_file as own
from tokenloom.offline.prompts import TokensPrompt
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
    # Weights that are given are no damage, however often they are compared.
    made = make_llm(max_num_seqs=4, num_gpu_blocks_override=64, weights_scrub_seconds=0.02)
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


def test_samples_that_wait_do_not_hide_the_weights_of_those_that_have_run(
    make_llm: Callable[..., LLM], demo: Tensors
) -> None:
    made = make_llm(max_num_seqs=1, max_num_batched_tokens=16, num_gpu_blocks_override=64)
    engine = made.llm_engine
    params = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": list(range(5, 45))}, params)
    engine.step()  # of the first sample, whose prompt is not complete
    engine.update_weights(demo, mode="wait")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert isinstance(outputs[-1], RequestOutput)
    assert outputs[-1].weights_versions == (0, 1)
    made.close()


def test_an_interrupt_while_requests_end_leaves_no_pause(
    llm: LLM, demo: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.llm_engine
    engine.add_request("a", STORY, LONG)
    engine.step()
    assert isinstance(engine.client, InprocClient)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.client._calls, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(demo, mode="wait")
    assert not engine.is_paused()
    engine.abort_request(["a"])


async def test_modes_of_the_async_engine(demo: Tensors, other: Tensors) -> None:
    async with AsyncLLM(EngineArgs(MODEL, dtype="float32", max_num_seqs=8, num_gpu_blocks_override=200)) as llm:
        longer = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)  # beside a busy machine, too

        async def ask(params: SamplingParams, begun: asyncio.Event | None = None) -> RequestOutput:
            async for output in llm.generate(STORY, params):
                last = output
                if begun is not None:
                    begun.set()
            return last

        old = await ask(longer)
        ends = {"wait": "length", "abort": "abort", "keep": "length"}
        for number, (mode, reason) in enumerate(ends.items(), 1):
            begun = asyncio.Event()
            asked = asyncio.create_task(ask(longer, begun))
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
                whole: TokensPrompt = {"prompt_token_ids": ids}
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


@pytest.mark.parametrize(
    "options", [{}, {"batch_invariant": True}, {"tensor_parallel_size": 2}], ids=["plain", "invariant", "two"]
)
def test_log_probabilities_are_those_of_transformers(
    make_llm: Callable[..., LLM], demo: Tensors, options: dict[str, Any]
) -> None:
    """Of samples drawn by weights that a trainer has given: transformers computes them with these within 1e-4."""
    policy = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(2)
    trained = {name: tensor * (1 + 0.03 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
               for name, tensor in demo.items()}  # fmt: skip
    policy.load_state_dict(trained, strict=False)
    llm = make_llm(max_num_seqs=8, num_gpu_blocks_override=200, **options)
    assert llm.update_weights(trained) == 1
    params = SamplingParams(n=3, temperature=1.0, max_tokens=30, logprobs=0, seed=3, ignore_eos=True)
    drawn = llm.generate([STORY, "Tom", "The dog and the cat"], params, use_tqdm=False)
    llm.close()
    worst, before = 0.0, 0.0
    start = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for output in drawn:
        assert output.weights_versions == (1,)
        for sample in output.outputs:
            assert sample.logprobs is not None
            told = [each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs, strict=True)]
            ids = torch.tensor([*output.prompt_token_ids, *sample.token_ids])
            worst = max(worst, farthest(policy, ids, told))
            before = max(before, farthest(start, ids, told))
    assert worst <= 1e-4
    assert before > 0.1, "the weights of the start are told apart"


@torch.inference_mode()
def farthest(policy: Any, ids: torch.Tensor, told: list[float]) -> float:
    """How far the log probabilities of the last of these tokens are from those that were told."""
    computed = policy(ids[None, :-1]).logits[0].double().log_softmax(-1)
    own = computed.gather(1, ids[1:, None])[-len(told) :, 0]
    return float((own - torch.tensor(told, dtype=torch.float64)).abs().max())


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


def test_programs_that_start_together_keep_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them removes what nobody has locked, which the other has just made."""
    make, lost = tempfile.mkdtemp, list[str]()

    def make_late(*args: object, **options: object) -> str:
        folder = str(make(*args, **options))  # type: ignore[call-overload]
        if not lost:
            lost.append(folder)
            os.rmdir(folder)
        return folder

    monkeypatch.setattr("tempfile.mkdtemp", make_late)
    mine = own.OwnWeights(DEMO_MODEL)
    folder = mine._staged._folder
    staged_weights.remove_if_unlocked(folder)
    assert lost
    assert folder.is_dir()
    mine.close()
    assert not folder.exists()


def test_without_room_in_memory_weights_are_kept_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo: Tensors
) -> None:
    """As in a container, which has 64 MB of shared memory."""
    usage = shutil.disk_usage

    def small(path: Path) -> object:
        return usage(path)._replace(free=4 << 20) if path == own._SHARED_MEMORY else usage(path)

    monkeypatch.setattr("shutil.disk_usage", small)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = own.OwnWeights(DEMO_MODEL)
    assert mine.write(demo).is_relative_to(tmp_path)
    mine.close()
    assert not list(tmp_path.iterdir())


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
