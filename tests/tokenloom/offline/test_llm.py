"""The offline API on the demo model."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.v1.types_pb2 import SamplingParams as wire

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
STORY = "Once upon a time"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def llm():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    llm = LLM("tokenloom-demo", dtype="float32", max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=64)
    yield llm
    llm.close()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_leak(request):
    yield
    if "llm" in request.fixturenames:
        core = request.getfixturevalue("llm")._client._core
        assert not core.has_work()
        assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_structured_outputs_of_several_samples(llm):
    constraint = StructuredOutputsParams(regex=r"[A-C]{2}-\d")
    params = SamplingParams(n=3, seed=1, max_tokens=20, structured_outputs=constraint)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    assert all(re.fullmatch(r"[A-C]{2}-\d", sample.text) for sample in output.outputs)
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}


def test_what_is_no_grammar_is_a_value_error(llm):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(ValueError, match=r"structured_outputs: .*unclosed group"):
        llm.generate([STORY, STORY], params, use_tqdm=False)


def test_every_prompt_form_in_input_order(llm):
    ids = llm.get_tokenizer().encode(STORY).ids
    prompts = [STORY, {"prompt": STORY}, {"prompt_token_ids": ids}, ids, "The dog"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [STORY, STORY, None, None, "The dog"]
    assert len({output.request_id for output in outputs}) == 5
    assert len(set(texts(outputs[:4]))) == 1
    assert texts(outputs[4:]) != texts(outputs[:1])
    assert outputs[0].prompt_token_ids == ids


def test_a_result_has_vllms_fields(llm):
    (output,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    (completion,) = output.outputs
    assert output.finished
    assert output.num_cached_tokens == 0
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
    assert len(completion.token_ids) == 12
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)


def test_sampling_params_for_each(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5, 3)]
    outputs = llm.generate([STORY] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate([STORY] * 3, params[:2], use_tqdm=False)


def test_priorities_need_their_policy(llm):
    (output,) = llm.generate(STORY, GREEDY, use_tqdm=False, priority=[0])
    assert output.error is None
    with pytest.raises(ValueError, match="first come, first served"):
        llm.generate([STORY] * 2, GREEDY, use_tqdm=False, priority=5)
    for wrong in ([0], ["high", "low"], [2**40, 2**40]):
        with pytest.raises(ValueError, match="priority"):
            llm.generate([STORY] * 2, GREEDY, use_tqdm=False, priority=wrong)


def test_a_seed_decides_and_its_absence_varies(llm):
    drawn = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 1, 2, None, None)]
    one, again, other, free, freer = texts(llm.generate([STORY] * 5, drawn, use_tqdm=False))
    assert one == again
    assert len({one, other, free, freer}) == 4


def test_stop_strings_and_tokens(llm):
    (plain,) = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    word = text.split()[3]
    stops = [
        SamplingParams(temperature=0.0, max_tokens=40, stop=[word, "never seen"]),
        SamplingParams(temperature=0.0, max_tokens=40, stop=word, include_stop_str_in_output=True),
        SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[ids[5]]),
        SamplingParams(temperature=0.0, max_tokens=40, detokenize=False),
    ]
    by_string, included, by_token, silent = [o.outputs[0] for o in llm.generate([STORY] * 4, stops, use_tqdm=False)]
    before = text[: text.index(word)]
    assert (by_string.text, by_string.finish_reason, by_string.stop_reason) == (before, "stop", word)
    assert included.text == before + word
    assert ids[: len(by_string.token_ids)] == by_string.token_ids
    end = ids.index(ids[5]) + 1
    assert (by_token.token_ids, by_token.finish_reason, by_token.stop_reason) == (ids[:end], "stop", ids[5])
    assert (silent.text, silent.token_ids) == ("", ids)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_output_that_ends_by_its_grammar_keeps_its_last_token(llm, ignore_eos):
    choice = StructuredOutputsParams(choice=["yes please"])
    params = SamplingParams(temperature=0.0, ignore_eos=ignore_eos, structured_outputs=choice)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("yes please", "stop", None)


def test_chat_ends_its_turn_and_ignore_eos_goes_on(llm):
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=None), use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == "2 + 3 = 5."
    (longer,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert len(longer.outputs[0].token_ids) == 16
    both = llm.chat([QUESTION, [{"role": "user", "content": "What is 1 + 1?"}]], GREEDY, use_tqdm=False)
    assert texts(both)[0] == completion.text
    assert len(both) == 2


def test_chat_takes_a_template_and_text_parts(llm):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]}]
    template = "{% for m in messages %}{{ m.content }}{{ suffix }}{% endfor %}"
    outputs = llm.chat(parts, GREEDY, False, chat_template=template, chat_template_kwargs={"suffix": "!"})
    assert outputs[0].prompt == "Once\nupon!"


def test_without_parameters_the_models_defaults_hold(llm):
    assert llm.get_default_sampling_params().max_tokens == 16
    (output,) = llm.generate(STORY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_a_longer_second_call_finds_the_first_in_the_cache(llm):
    llm.reset_prefix_cache()
    ids = list(range(10, 60))
    llm.generate(ids, GREEDY, use_tqdm=False)
    (output,) = llm.generate([*ids, 7], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 48
    (salted,) = llm.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, GREEDY, use_tqdm=False)
    assert salted.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ("", GREEDY, "prompt is empty"),
        ([2048], GREEDY, "token id 2048"),
        ("\ud83d", GREEDY, "half a surrogate pair"),
        ({"text": "x"}, GREEDY, "'text' is not supported"),
        ("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a")), "unclosed group"),
        ("x", SamplingParams(stop_token_ids=[99999]), "stop_token_ids"),
    ],
)
def test_a_wrong_request_is_refused_alone(llm, prompt, params, named):
    story, refused = llm.generate([STORY, prompt], [GREEDY, params], use_tqdm=False)
    assert (story.error, story.outputs[0].finish_reason) == (None, "length")
    assert named in refused.error
    assert (refused.finished, refused.outputs[0].finish_reason) == (True, "error")
    for several in ([prompt], [prompt, prompt]):
        with pytest.raises(ValueError, match=named):
            llm.generate(several, params, use_tqdm=False)


@pytest.mark.parametrize("num_tokens", [250, 256])
def test_a_prompt_that_does_not_fit_is_refused_alone(llm, num_tokens):
    long = [5] * num_tokens
    first, refused, last = llm.generate([STORY, long, STORY], GREEDY, use_tqdm=False)
    assert refused.finished
    assert (refused.outputs[0].finish_reason, refused.outputs[0].token_ids) == ("error", [])
    assert "maximum context length is 256" in refused.error
    assert first.outputs[0].token_ids == last.outputs[0].token_ids != []
    assert first.error is None
    streamed = {output.request_id: output for output in llm.stream([long, STORY], GREEDY)}
    assert [bool(output.error) for output in streamed.values()] == [True, False]
    with pytest.raises(ValueError, match="maximum context length is 256"):
        llm.generate([long], GREEDY, use_tqdm=False)


def test_a_conversation_that_the_template_refuses_is_refused_alone(llm):
    each = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
    template = "{% for m in messages %}" + each + "{% endfor %}"
    turns = [[{"role": role, "content": "Once"}] for role in ("user", "tool")]
    answered, refused = llm.chat(turns, GREEDY, False, chat_template=template)
    assert (answered.error, answered.prompt) == (None, "Once")
    assert "no tools" in refused.error


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_a_progress_bar_with_speeds(llm, capsys):
    llm.generate([STORY] * 2, GREEDY)
    bar = capsys.readouterr().err
    assert "Processed prompts: 100%" in bar
    assert "est. speed input: " in bar
    assert "toks/s, output: " in bar
    llm.generate(STORY, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 4096}, "max_model_len"),
        ({"block_size": 1.5}, "block_size"),
        ({"kv_cache_memory_bytes": 100}, "KV cache"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"tokenizer": "/no/such/directory"}, "no such directory"),
    ],
)
def test_a_wrong_argument_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        LLM("tokenloom-demo", **arguments)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM("tokenloom-demo", tensor_paralel_size=2)


def test_a_missing_model_is_named():
    with pytest.raises(ValueError, match="no such directory"):
        LLM("/no/such/model")


def test_names_sizes_and_what_has_no_effect_on_a_cpu():
    llm = LLM(
        "tokenloom-demo",
        dtype=torch.bfloat16,
        kv_cache_memory_bytes=1 << 20,
        gpu_memory_utilization=0.5,
        served_model_name="mine",
        max_num_batched_tokens=48,
        enable_prefix_caching=False,
        seed=None,
    )
    assert llm.model_name == "mine"
    assert llm._builder.limits.max_model_len == 512  # what a MiB holds
    assert len(llm.generate([STORY] * 3, SamplingParams(ignore_eos=True), use_tqdm=False)) == 3


def test_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json\n"
        "from tokenloom import LLM, SamplingParams\n"
        "llm = LLM(model='tokenloom-demo', num_gpu_blocks_override=128)\n"
        "outputs = llm.generate(['Once upon a time'] * 2, SamplingParams(temperature=0, max_tokens=4))\n"
        "print(json.dumps([output.outputs[0].token_ids for output in outputs]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    first, second = json.loads(done.stdout)
    assert first == second
    assert len(first) == 4
    assert "Traceback" not in done.stderr


def test_a_model_may_state_more_than_fits(llm, monkeypatch):
    """An output longer than the context, an end token beyond the vocabulary."""
    stated = replace(
        llm._builder._info, default_sampling_params=wire(max_tokens=9999, temperature=0), eos_token_ids=(99_999,)
    )
    monkeypatch.setattr(llm._builder, "_info", stated)
    (output,) = llm.generate([[5] * 250], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


def test_embeddings_of_a_text_give_its_tokens():
    llm = LLM("tokenloom-demo", dtype="float32", max_model_len=64, num_gpu_blocks_override=8, enable_prompt_embeds=True)
    (expected,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    ids = expected.prompt_token_ids
    with safe_open(DEMO_MODEL / "model.safetensors", framework="pt") as file:
        rows = file.get_tensor("model.embed_tokens.weight")[ids]
    prompts = [{"prompt_embeds": rows}, {"prompt_embeds": [ids[:1], rows[1:3], ids[3:]]}]
    assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == texts([expected]) * 2
    for wrong, words in ((rows[:, :5], "bytes for"), (rows[0], "float tensor"), (rows / 0, "NaN or infinities")):
        with pytest.raises(ValueError, match=words):
            llm.generate({"prompt_embeds": wrong}, GREEDY, use_tqdm=False)
    llm.close()


def test_embeddings_are_off_unless_asked_for(llm):
    with pytest.raises(ValueError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": torch.ones(2, 4)}, GREEDY, use_tqdm=False)


def test_the_lowest_priority_runs_first_and_a_template_may_replace_the_checkpoints():
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    llm = LLM("tokenloom-demo", worker="hash", max_num_seqs=1, scheduling_policy="priority", chat_template=template)
    finished = [
        output.request_id
        for output in llm.stream(["a", "b", "c"], SamplingParams(max_tokens=2, ignore_eos=True))
        if output.finished
    ]
    assert finished == ["0", "1", "2"]
    order = []
    collect, llm._loop.step = llm._loop.step, lambda: order.extend(ended := collect()) or ended
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False, priority=[3, -1, 2])
    assert [request.output.request_id for request in order] == ["4", "5", "3"]
    (output,) = llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), False)
    assert output.prompt == "<x>"
    llm.close()
