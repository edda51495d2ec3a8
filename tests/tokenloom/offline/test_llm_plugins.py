"""Logits processors and schedulers of a plugin, in the offline API on the demo model."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.plugin_packages import EXAMPLE_NAME, install_example
from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.model_files.model_path import DEMO_MODEL

EVERY, TOKEN = 4, 77
CHORUS = {"chorus_token_id": TOKEN, "chorus_every": EVERY}
PROMPTS = [[100 + 7 * index, *range(200, 230 + index)] for index in range(6)]


@pytest.fixture(scope="module")
def llm_with(make_llm: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLM]]:
    """Makes an ``LLM`` that may load the example's plugins."""
    directory = tmp_path_factory.mktemp("packages")
    install_example(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("PYTHONPATH", str(directory))  # of the process that compiles grammars
        yield lambda **options: make_llm(plugins=[EXAMPLE_NAME], max_num_seqs=8, **options)


@pytest.fixture(scope="module")
def llm(llm_with: Callable[..., LLM]) -> LLM:
    return llm_with(num_gpu_blocks_override=128)


def params(index: int, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "seed": index, "extra_args": CHORUS, "ignore_eos": True, **values})


def generate(llm: LLM, prompts: Sequence[Any], each: Sequence[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False)]


def test_a_plugin_changes_the_tokens_of_requests_that_ask(llm: LLM) -> None:
    plain = generate(llm, PROMPTS, [params(index, extra_args=None) for index in range(6)])
    each = [params(index, extra_args=CHORUS if index % 2 else None) for index in range(6)]
    found = generate(llm, PROMPTS, each)
    for index, tokens in enumerate(found):
        if index % 2:
            assert tokens[EVERY - 1 :: EVERY] == [TOKEN] * 4
            assert tokens != plain[index]
        else:
            assert tokens == plain[index], "another request of the batch asked"


def test_tokens_are_the_same_alone_preempted_and_with_drafts(llm: LLM, llm_with: Callable[..., LLM]) -> None:
    each = [params(index, max_tokens=48) for index in range(6)]
    expected = [generate(llm, [prompt], [own])[0] for prompt, own in zip(PROMPTS, each, strict=True)]
    assert all(TOKEN in tokens for tokens in expected)
    assert generate(llm, PROMPTS, each) == expected
    small = llm_with(num_gpu_blocks_override=16)
    assert generate(small, PROMPTS, each) == expected
    assert small._client._core.scheduler.stats().num_preemptions > 0
    drafts = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}
    fast = llm_with(num_gpu_blocks_override=128, speculative_config=drafts)
    drafting = fast._client._core.scheduler.drafts
    drafting.free_rows = drafting.costs = None  # also on a busy machine, on which no draft looks as if it paid
    assert generate(fast, PROMPTS, each) == expected
    counts = fast._client._core.scheduler.stats().spec_decoding
    assert counts is not None
    assert counts.num_accepted_tokens > 0


def test_an_output_goes_on_where_it_was(llm: LLM) -> None:
    """As another engine continues it: the tokens so far are part of the request."""
    (whole,) = generate(llm, PROMPTS[:1], [params(0)])
    core = llm._client._core
    sampling = CoreSamplingParams(max_tokens=16, seed=0, extra_args=CHORUS)
    request = EngineCoreRequest("continued", PROMPTS[0], sampling, accepted_token_ids=whole[:6])
    core.add_request(request)
    tokens = []
    while core.has_work():
        for output in core.step().outputs:
            tokens += output.new_token_ids
    assert whole[:6] + tokens == whole


def test_a_grammar_is_obeyed(llm: LLM) -> None:
    own = params(0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), ignore_eos=False)
    (output,) = llm.generate(["Is it?"], own, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no", "") or output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"chorus_token_id": 1}, "extra_args: needs chorus_every"),
        ({**CHORUS, "chorus_every": 1}, "extra_args: chorus_every must be at least 2"),
        ({"other": 1}, "extra_args: no plugin of the engines reads 'other'; they read: chorus_every, chorus_token_id"),
    ],
)
def test_wrong_arguments_are_refused(llm: LLM, arguments: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate(PROMPTS[:1], params(0, extra_args=arguments), use_tqdm=False)


def test_a_failure_ends_its_request_alone(llm: LLM) -> None:
    each = [params(0), params(1, extra_args={**CHORUS, "chorus_token_id": 1 << 30}), params(2)]
    outputs = llm.generate(PROMPTS[:3], each, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "a plugin that its extra_args ask for has failed" in str(outputs[1].error)


def test_a_plugin_that_leaves_no_token_is_named_by_the_error(llm: LLM) -> None:
    """It named ``allowed_token_ids``, which the request does not have."""
    own = params(0, stop_token_ids=[TOKEN], min_tokens=8)
    with pytest.raises(ValueError, match="extra_args: no token may come next"):
        llm.generate(PROMPTS[:1], own, use_tqdm=False)


def test_engines_with_and_without_a_plugin_differ(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    plain = make_llm(num_gpu_blocks_override=32)
    assert llm._client.ready.numerics == f"{plain._client.ready.numerics}/plugin-{EXAMPLE_NAME}-0.1.0"
    with pytest.raises(ValueError, match="extra_args is not available: no plugin of the engines reads arguments"):
        plain.generate(PROMPTS[:1], params(0), use_tqdm=False)


def test_a_scheduler_orders_requests(llm_with: Callable[..., LLM]) -> None:
    llm = llm_with(num_gpu_blocks_override=32, scheduling_policy=f"{EXAMPLE_NAME}:shortest_first")
    found = generate(llm, PROMPTS, [params(index) for index in range(6)])
    assert [len(tokens) for tokens in found] == [16] * 6


@pytest.mark.parametrize(
    ("option", "name", "built_in"),
    [
        ("device", "host", "cpu"),
        ("attention_backend", "plain", "torch"),
        ("distributed_executor_backend", "in_process", "uni"),
    ],
)
def test_a_part_of_the_engine_is_replaced_without_a_loss(
    llm_with: Callable[..., LLM], option: str, name: str, built_in: str
) -> None:
    each = [params(index, logprobs=2) for index in range(6)]
    found = [
        [output.outputs[0] for output in made.generate(PROMPTS, each, use_tqdm=False)]
        for value in (f"{EXAMPLE_NAME}:{name}", built_in)
        for made in [llm_with(num_gpu_blocks_override=64, **{option: value})]
    ]
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(
            other.cumulative_logprob, abs=1e-3
        )  # other sums, other last bits


def test_a_format_of_checkpoints(llm_with: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "npz"
    shutil.copytree(DEMO_MODEL, path)
    (path / "model.safetensors").unlink()
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    np.savez(path / "weights.npz", **{name: tensor.float().numpy() for name, tensor in tensors.items()})
    expected = generate(llm_with(num_gpu_blocks_override=32), PROMPTS, [params(index) for index in range(6)])
    made = LLM(path, dtype="float32", max_model_len=256, num_gpu_blocks_override=32, max_num_seqs=8,
               plugins=EXAMPLE_NAME, load_format=f"{EXAMPLE_NAME}:npz")  # fmt: skip
    assert generate(made, PROMPTS, [params(index) for index in range(6)]) == expected
    made.sleep()
    made.wake_up()
    assert generate(made, PROMPTS[:1], [params(0)]) == expected[:1]
    made.close()


def test_a_grammar_backend(llm_with: Callable[..., LLM]) -> None:
    own = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    for backend in (f"{EXAMPLE_NAME}:lark", "llguidance"):
        made = llm_with(num_gpu_blocks_override=32, structured_outputs_backend=backend)
        (output,) = made.generate(["Is it?"], own, use_tqdm=False)
        assert output.outputs[0].text in ("yes", "no")


def test_an_attention_backend_of_a_plugin_has_a_layout_of_its_own(llm_with: Callable[..., LLM]) -> None:
    """Of its package as of each other one: two backends of a package need not lay KV out, or compute, alike."""
    chosen = f"{EXAMPLE_NAME}:plain"
    plain, plugged = (
        llm_with(num_gpu_blocks_override=32, attention_backend=value)._client.ready for value in ("torch", chosen)
    )
    assert plugged.kv_layout == f"{plain.kv_layout}/plugin-{EXAMPLE_NAME}-0.1.0/{chosen}"
    assert f"/torch-{chosen}/" in plugged.numerics


def test_a_chat_template(llm_with: Callable[..., LLM]) -> None:
    made = llm_with(num_gpu_blocks_override=32, chat_template=f"{EXAMPLE_NAME}:shout")
    (output,) = made.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt is not None
    assert "HELLO" in output.prompt


def test_what_is_not_named_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"name its package too, with --plugins {EXAMPLE_NAME}|is installed"):
        make_llm(scheduling_policy=f"{EXAMPLE_NAME}:shortest_first")
    with pytest.raises(ValueError, match="no package nobody is installed"):
        make_llm(plugins=["nobody"])
