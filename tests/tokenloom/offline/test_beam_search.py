"""``LLM.beam_search`` on the demo model; ``tests/parity`` compares its sequences with those of transformers."""

import pytest
import torch

from tokenloom import BeamSearchParams, SamplingParams
from tokenloom.engine_core.data.errors import EnginePausedError
from tokenloom.engine_core.data.messages import FinishReason

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm(max_num_seqs=8, num_gpu_blocks_override=128, enable_prompt_embeds=True)


@pytest.fixture(autouse=True)
def no_leak(llm):
    yield
    core = llm._client._core
    assert not core.has_work()
    assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks


def test_sequences_have_vllms_fields(llm):
    (output,) = llm.beam_search(STORY, BeamSearchParams(beam_width=3, max_tokens=6))
    ids = llm.get_tokenizer().encode(STORY).ids
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        assert sequence.tokens[: len(ids)] == ids
        own = sequence.tokens[len(ids) :]
        assert len(own) == len(sequence.logprobs) == 6
        assert all(len(position) == 6 for position in sequence.logprobs)
        each = [position[token_id].logprob for token_id, position in zip(own, sequence.logprobs, strict=True)]
        assert sequence.cum_logprob == pytest.approx(sum(each))
        assert sequence.logprobs[0][own[0]].decoded_token
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=False)
        assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    sums = [sequence.cum_logprob for sequence in output.sequences]
    assert sums == sorted(sums, reverse=True)


def test_one_beam_is_greedy(llm):
    (greedy,) = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    (output,) = llm.beam_search(STORY, BeamSearchParams(beam_width=1, max_tokens=12, temperature=0.7))
    assert output.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_an_end_of_sequence_token_ends_a_sequence(llm):
    prompt = llm.llm_engine.chats.encode([[{"role": "user", "content": "What is 2 + 3?"}]])[0].token_ids
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=16))
    best = output.sequences[0]
    assert best.finish_reason == "stop"
    assert best.stop_reason == best.tokens[-1]
    assert best.stop_reason in llm._builder.eos_token_ids
    assert "2 + 3 = 5." in best.text
    (longer,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=16, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in longer.sequences} == {len(prompt) + 16}


@pytest.mark.parametrize("concurrency_limit", [None, 1, 2])
def test_several_prompts_in_order(llm, concurrency_limit):
    """Ten beams and more are in flight, with eight rows in the batch."""
    prompts = [STORY, {"prompt": "The dog"}, [5, 6, 7], {"prompt_token_ids": [9] * 40, "cache_salt": "mine"}]
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    together = llm.beam_search(prompts, params, concurrency_limit=concurrency_limit)
    alone = [output for prompt in prompts for output in llm.beam_search(prompt, params)]
    assert [[each.tokens for each in output.sequences] for output in together] == [
        [each.tokens for each in output.sequences] for output in alone
    ]


def test_beams_of_embeddings(llm):
    rows = torch.randn(20, llm._builder.limits.hidden_size, generator=torch.Generator().manual_seed(0))
    (output,) = llm.beam_search({"prompt_embeds": rows}, BeamSearchParams(beam_width=2, max_tokens=4))
    (greedy,) = llm.generate({"prompt_embeds": rows}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert [len(sequence.tokens) for sequence in output.sequences] == [24, 24]
    assert greedy.outputs[0].token_ids[0] in {sequence.tokens[20] for sequence in output.sequences}


def test_beams_find_their_prefix_in_the_cache(llm):
    """Blocks of 16 tokens: each step computes the tokens of one block at most, for each beam."""
    core = llm._client._core
    prompt = list(range(100, 200))
    before = core.scheduler.stats()
    queries, hits = before.prefix_cache_queries, before.prefix_cache_hits
    llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    after = core.scheduler.stats()
    queries, hits = after.prefix_cache_queries - queries, after.prefix_cache_hits - hits
    assert queries == 100 + 4 * sum(range(101, 120))
    assert queries - hits <= 100 + 4 * 19 * 16


def test_a_progress_bar_on_request(llm, capsys):
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    llm.beam_search([STORY, "The dog"], params)
    assert capsys.readouterr().err == ""
    llm.beam_search([STORY, "The dog"], params, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_an_interrupt_leaves_a_usable_engine(llm, monkeypatch):
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    expected = llm.beam_search(STORY, params)
    calls = 0
    step = llm._loop.step

    def interrupt():
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._loop, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(STORY, params)
    assert llm.beam_search(STORY, params) == expected


def test_a_sleeping_engine_is_refused(llm):
    llm.sleep()
    with pytest.raises(EnginePausedError, match="wake_up"):
        llm.beam_search(STORY, BeamSearchParams(beam_width=2, max_tokens=2))
    llm.wake_up()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"beam_width": 0}, "beam_width must be"),
        ({"beam_width": True}, "beam_width must be"),
        ({"beam_width": 129}, "beam_width must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"length_penalty": float("nan")}, "length_penalty must be"),
        ({"length_penalty": 11}, "length_penalty must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"beam_width": 11}, "beam_width may be at most 10"),
        ({"max_tokens": 254}, "max_tokens is 254"),
    ],
)
def test_wrong_parameters_are_named(llm, params, named):
    with pytest.raises(ValueError, match=named):
        llm.beam_search([5, 6, 7], BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | params))


def test_wrong_prompts_and_limits_are_named(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.beam_search(["", ""], params)
    with pytest.raises(ValueError, match="concurrency_limit"):
        llm.beam_search([STORY], params, concurrency_limit=0)
    assert llm.beam_search([], params) == []


def test_a_prompt_that_fails_leaves_the_searches_of_others_alone(llm, monkeypatch):
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (alone,) = llm.beam_search(STORY, params)
    compute = llm._client.get_output

    def fail_in_its_second_step():
        outputs = compute()
        for output in outputs.outputs:
            prompt = llm._loop._live[output.request_id][0].output.prompt_token_ids
            if prompt[:2] == [8, 9] and len(prompt) > 2:
                output.finish_reason, output.error = FinishReason.ERROR, "no finite logit"
        return outputs

    monkeypatch.setattr(llm._client, "get_output", fail_in_its_second_step)
    first, refused, failed, last = llm.beam_search([STORY, "", [8, 9], STORY], params)
    assert [sequence.tokens for sequence in first.sequences] == [sequence.tokens for sequence in alone.sequences]
    assert first == last
    assert first.error is None
    assert (refused.sequences, failed.sequences) == ([], [])
    assert "prompt is empty" in refused.error
    assert "no finite logit" in failed.error
    with pytest.raises(RuntimeError, match="no finite logit"):
        llm.beam_search([[8, 9]], params)
