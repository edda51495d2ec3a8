"""What a request may ask of sampling, through the offline API on the demo model."""

import math

import pytest
import torch

from tokenloom import LLM, RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    llm = LLM("tokenloom-demo", dtype="float32", max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=128)
    yield llm
    core = llm._client._core
    assert not core.has_work()
    assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks
    llm.close()
    torch.set_num_threads(threads)


def greedy(llm, prompt=STORY, **values):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **values})
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


def test_samples_share_their_prompt_and_differ(llm):
    llm.reset_prefix_cache()
    prompt = list(range(100, 164))
    before = llm._client._core.scheduler.stats().prefix_cache_hits
    (output,) = llm.generate([prompt], SamplingParams(n=4, seed=7, max_tokens=12), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert llm._client._core.scheduler.stats().prefix_cache_hits - before == 3 * 48
    (alone,) = llm.generate([prompt], SamplingParams(seed=7, max_tokens=12), use_tqdm=False)
    assert alone.outputs[0] == output.outputs[0]
    (again,) = llm.generate([prompt], SamplingParams(n=3, seed=7, max_tokens=12), use_tqdm=False)
    assert again.outputs == output.outputs[:3]


def test_logprobs(llm):
    completion = greedy(llm, logprobs=2, logprob_token_ids=[5])
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, told in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(told)) == token_id
        assert told[token_id].rank == 1
        assert len(told) in (2, 3)  # 5 may be one of the best
        assert 5 in told
        assert told[token_id].logprob == max(logprob.logprob for logprob in told.values())
    total = sum(told[id_].logprob for id_, told in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert "".join(told[id_].decoded_token for id_, told in zip(completion.token_ids, completion.logprobs, strict=True))


def test_prompt_logprobs_whatever_is_cached(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    prompt = list(range(50, 90))
    (first,) = llm.generate([prompt], params, use_tqdm=False)
    (again,) = llm.generate([prompt], params, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    assert first.prompt_logprobs[0] is None
    assert [next(iter(told)) for told in first.prompt_logprobs[1:]] == prompt[1:]
    (plain,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert (plain.num_cached_tokens, plain.prompt_logprobs) == (32, None)
    assert plain.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_reader_may_skip_the_cache(llm):
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    for _ in range(2):
        (output,) = llm.generate([list(range(40, 80))], params, use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_more_logprobs_than_allowed_are_refused(llm):
    with pytest.raises(ValueError, match="logprobs must be from 0 to 20"):
        greedy(llm, logprobs=21)
    with pytest.raises(ValueError, match="not -1"):
        greedy(llm, prompt_logprobs=-1)


def test_all_logprobs_where_the_cap_is_off():
    llm = LLM("tokenloom-demo", dtype="float32", max_model_len=64, num_gpu_blocks_override=8, max_logprobs=-1)
    completion = greedy(llm, logprobs=-1, max_tokens=2)
    for told in completion.logprobs:
        assert len(told) == 2048
        assert math.fsum(math.exp(logprob.logprob) for logprob in told.values()) == pytest.approx(1, abs=1e-4)
    llm.close()


def test_bias_and_allowed_tokens_decide(llm):
    assert greedy(llm, logit_bias={77: 100.0}, max_tokens=3).token_ids == [77] * 3
    allowed = greedy(llm, allowed_token_ids=[20, 30, 40], temperature=50.0, seed=3, max_tokens=20, ignore_eos=True)
    assert set(allowed.token_ids) <= {20, 30, 40}
    assert len(set(allowed.token_ids)) > 1


def test_bad_words_do_not_appear_nor_change_what_is_before_them(llm):
    plain = greedy(llm)
    words = plain.text.split()
    word = next(word for word in words[1:] if word.isalpha())
    without = greedy(llm, bad_words=[word])
    assert word in plain.text
    assert f" {word}" not in without.text
    assert without.token_ids != plain.token_ids
    end = plain.text.index(word)
    assert without.text[: end - 1] == plain.text[: end - 1]


def test_masks_that_leave_nothing_are_an_error_that_names_them(llm):
    with pytest.raises(ValueError, match="allowed_token_ids: none of them may come next"):
        greedy(llm, allowed_token_ids=[300, 301], stop_token_ids=[300, 301], min_tokens=4)
    assert greedy(llm).token_ids


def test_no_stop_string_counts_before_min_tokens(llm):
    plain = greedy(llm)
    texts = [llm.get_tokenizer().decode([token_id]) for token_id in plain.token_ids]
    stop = texts[2].strip()
    assert greedy(llm, stop=[stop], min_tokens=2).token_ids == plain.token_ids[:3]
    late = greedy(llm, stop=[stop], min_tokens=3)
    assert len(late.token_ids) > 3
    assert stop in late.text


def test_no_end_before_min_tokens(llm):
    plain = greedy(llm)
    stop = plain.token_ids[2]
    early = greedy(llm, stop_token_ids=[stop])
    late = greedy(llm, stop_token_ids=[stop], min_tokens=8)
    assert len(early.token_ids) <= 3
    assert len(late.token_ids) >= 8
    assert stop not in late.token_ids[:8]


def test_repetition_is_cut(llm):
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    completion = greedy(llm, logit_bias={77: 100.0}, repetition_detection=detection)
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([77] * 4, "repetition", None)


def test_outputs_obey_a_structure(llm):
    colours = StructuredOutputsParams(choice=["red", "green", "blue"])
    assert greedy(llm, structured_outputs=colours).text in ("red", "green", "blue")
    number = greedy(llm, structured_outputs=StructuredOutputsParams(regex="[1-9][0-9]{2}"))
    assert 100 <= int(number.text) <= 999


def stream(llm, **values):
    return list(llm.stream(STORY, SamplingParams(temperature=0.0, max_tokens=12, **values)))


def test_streams_tell_what_generate_does(llm):
    expected = greedy(llm)
    deltas = stream(llm, output_kind=RequestOutputKind.DELTA)
    assert [len(output.outputs[0].token_ids) for output in deltas] == [1] * 12
    assert "".join(output.outputs[0].text for output in deltas) == expected.text
    assert [output.finished for output in deltas] == [False] * 11 + [True]
    wholes = stream(llm, stream_interval=5)
    assert [len(output.outputs[0].token_ids) for output in wholes] == [1, 6, 11, 12]
    assert wholes[-1].outputs[0] == expected
    (final,) = stream(llm, output_kind=RequestOutputKind.FINAL_ONLY)
    assert final.outputs[0] == expected


def test_calls_while_a_stream_is_read(llm):
    expected = greedy(llm)
    outputs = llm.stream(STORY, SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA))
    tokens = list(next(outputs).outputs[0].token_ids)
    assert greedy(llm, max_tokens=5).token_ids == expected.token_ids[:5]
    for output in outputs:
        tokens += output.outputs[0].token_ids
    assert tokens == expected.token_ids


def test_a_stream_that_is_left_early_leaves_nothing(llm):
    outputs = llm.stream([STORY, "The dog"], SamplingParams(max_tokens=200, ignore_eos=True))
    next(outputs)
    outputs.close()
    assert not llm._client._core.has_requests()
    assert llm._loop._live == {}


def test_wrong_parameters_of_a_stream_are_named_at_once(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream("")


def test_without_text(llm):
    completion = greedy(llm, detokenize=False, logprobs=0)
    assert completion.text == ""
    assert all(told.decoded_token is None for (told,) in (position.values() for position in completion.logprobs))
