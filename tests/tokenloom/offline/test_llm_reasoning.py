"""Reasoning through the offline API on the demo model, whose tokenizer writes each mark in several tokens."""

import re

import pytest
from msgspec.structs import replace

from tokenloom import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams

PROMPTS = ["Once upon a time", "The dog and the cat went to the river. " * 4, "She opened the door and saw " * 5]
CODE = r"[A-Z]{2}-[0-9]{3}"
DATE = StructuredOutputsParams(regex=CODE)
ANY = SamplingParams(max_tokens=40, ignore_eos=True, thinking_token_budget=6, structured_outputs=DATE)
PARAMS = {
    "greedy": replace(ANY, temperature=0.0),
    "seed": replace(ANY, seed=7, top_p=0.9, top_k=50, min_p=0.01),
    "top_k 1": replace(ANY, top_k=1),
    "penalties": replace(ANY, seed=3, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    "logprobs": replace(ANY, seed=4, logprobs=3, prompt_logprobs=2),
    "bias": replace(ANY, seed=5, logit_bias={63: -100.0}),
    "bad words": replace(ANY, seed=6, bad_words=["</think>", "<"]),
    "samples": replace(ANY, seed=8, n=3),
    "no grammar": SamplingParams(max_tokens=20, seed=9, ignore_eos=True, thinking_token_budget=3, min_tokens=20),
}


def make_llm(**options):
    return LLM(
        "tokenloom-demo",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        **{"num_gpu_blocks_override": 400, "reasoning_parser": "deepseek_r1", **options},
    )


@pytest.fixture(scope="module")
def llm():
    llm = make_llm()
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(llm):
    """What each of the parameters gives on the usual engine."""
    return {name: tokens(llm.generate(PROMPTS * 3, params, use_tqdm=False)) for name, params in PARAMS.items()}


def tokens(outputs):
    """Log probabilities differ in the last bits between chunks of different sizes."""
    return [(each.token_ids, each.text, each.num_reasoning_tokens) for output in outputs for each in output.outputs]


def texts(output):
    return [completion.text.partition("</think>") for completion in output.outputs]


@pytest.mark.parametrize("name", PARAMS)
def test_a_budget_holds_under_every_sampling_feature(llm, name):
    params = PARAMS[name]
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        for completion, (_, mark, answer) in zip(output.outputs, texts(output), strict=True):
            assert mark
            assert completion.num_reasoning_tokens == params.thinking_token_budget
            assert params.structured_outputs is None or re.fullmatch(CODE, answer)
        assert output.num_reasoning_tokens == params.thinking_token_budget * params.n


def test_a_forced_token_is_drawn_even_if_it_is_not_allowed(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, thinking_token_budget=2, allowed_token_ids=[400, 401])
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    mark = llm.get_tokenizer().encode("</think>", add_special_tokens=False).ids
    assert completion.token_ids[2 : 2 + len(mark)] == mark
    assert {*completion.token_ids[:2], *completion.token_ids[2 + len(mark) :]} <= {400, 401}


@pytest.mark.parametrize(
    "options", [{"async_scheduling": True}, {"num_gpu_blocks_override": 20}, {"enable_prefix_caching": False}], ids=str
)
def test_neither_scheduling_nor_preemption_changes_it(expected, options):
    other = make_llm(**options)
    for name, params in PARAMS.items():
        found = other.generate(PROMPTS * 3, params, use_tqdm=False)
        assert tokens(found) == expected[name], name
    if "num_gpu_blocks_override" in options:
        assert other._client._core.scheduler.stats().num_preemptions > 0
    other.close()


def test_a_stream_counts_up_to_a_stop_string(llm):
    params = SamplingParams(
        max_tokens=30, seed=1, thinking_token_budget=4, stop=["/th"], output_kind=RequestOutputKind.DELTA
    )
    counts = [output.outputs[0].num_reasoning_tokens for output in llm.stream(PROMPTS[0], params)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 4 + len(["<", "/", "th"]), "the mark is not complete"


def test_an_output_that_ends_before_its_constraint_begins_is_cut_off(llm):
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0}, structured_outputs=DATE)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")
    for free in (replace(params, structured_outputs=None), replace(params, ignore_eos=True, stop_token_ids=[700])):
        free = replace(free, logit_bias={2 if free.structured_outputs is None else 700: 100.0})
        (output,) = llm.generate(PROMPTS[0], free, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"


def test_without_a_parser_a_budget_is_refused_by_name():
    llm = make_llm(reasoning_parser="auto")  # the demo's template has no marks
    with pytest.raises(ValueError, match=r"thinking_token_budget is not available.*--reasoning-parser"):
        llm.generate(PROMPTS[0], ANY, use_tqdm=False)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.num_reasoning_tokens is None
    llm.close()


def test_qwen3_reasons_if_the_model_opens_it():
    llm = make_llm(reasoning_parser="qwen3")
    params = replace(ANY, temperature=0.0)
    (plain,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert re.fullmatch(CODE, plain.outputs[0].text)
    assert plain.num_reasoning_tokens == 0
    encode = llm.get_tokenizer().encode
    (opened,) = llm.generate([[*encode("Once").ids, *encode("<think>").ids]], params, use_tqdm=False)
    assert re.fullmatch(CODE, texts(opened)[0][2])
    assert opened.num_reasoning_tokens == 6
    llm.close()
