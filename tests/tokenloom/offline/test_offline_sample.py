"""What the offline API makes of an engine core's outputs for one sample."""

import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprobs,
    RoutedExperts,
)
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline.offline_request import CoreRefusal, OfflineSample, TextSettings
from tokenloom.services.output_processor.text.detokenizer import Detokenizer, OutputText, Vocabulary

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
def make(tokenizer):
    def make(stop=(), text=True, **params):
        request = EngineCoreRequest("r", [5, 6], CoreSamplingParams(max_tokens=9, seed=1, **params))
        vocabulary = Vocabulary(tokenizer)
        detokenizer = Detokenizer(vocabulary, [5, 6], stop=stop, detokenize=text)
        output_text = OutputText(detokenizer, (EOS, 17), (EOS,))
        return OfflineSample(request, 0, TextSettings(output_text, vocabulary if text else None))

    return make


def step(token_ids, reason=None, stop_token_id=None, error="", logprobs=None):
    return EngineCoreOutput("r", token_ids, 0, reason, stop_token_id, error=error, new_logprobs=logprobs)


def test_tokens_and_text_come_together(make, tokenizer):
    sample, ids = make(), tokenizer.encode("Once upon a time").ids
    assert not sample.accept(step(ids[:1]))
    assert not sample.completion.finished()
    sample.accept(step(ids[1:], FinishReason.LENGTH))
    completion = sample.completion
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("Once upon a time", "length", ids)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_a_stop_string_cuts_tokens_text_and_logprobs(make, tokenizer):
    ids = tokenizer.encode("Once upon a time").ids
    sample = make(stop=["upon"], logprobs=0)
    assert sample.accept(step(ids, logprobs=Logprobs([-1.0] * len(ids), [1] * len(ids))))
    completion = sample.completion
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Once ", "stop", "upon")
    assert tokenizer.decode(completion.token_ids).endswith("upon")
    assert len(completion.token_ids) < len(ids)
    assert [list(told) for told in completion.logprobs] == [[id_] for id_ in completion.token_ids]
    assert completion.cumulative_logprob == -len(completion.token_ids)


@pytest.mark.parametrize(("token_id", "reason"), [(EOS, None), (17, 17)])
def test_the_models_own_end_is_no_stop_reason(make, token_id, reason):
    sample = make()
    sample.accept(step([9, token_id], FinishReason.STOP, token_id))
    completion = sample.completion
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
    assert completion.token_ids == [9, token_id]


def test_without_text(make):
    sample = make(text=False, logprobs=1)
    sample.accept(step([9], FinishReason.REPETITION, logprobs=Logprobs([-1.0], [1], 1, [9], [-1.0])))
    assert (sample.completion.text, sample.completion.finish_reason) == ("", "repetition")
    assert sample.completion.logprobs[0][9].decoded_token is None


def test_news_are_the_whole_or_what_is_new(make, tokenizer):
    sample, ids = make(logprobs=0), tokenizer.encode("Once upon a time").ids
    told = []
    for token_id in ids:
        sample.accept(step([token_id], logprobs=Logprobs([-0.5], [1])))
        told.append(sample.news(whole=False))
    assert "".join(news.text for news in told) == "Once upon a time"
    assert [news.token_ids for news in told] == [[token_id] for token_id in ids]
    assert all(len(news.logprobs) == 1 for news in told)
    whole = sample.news(whole=True)
    assert whole == sample.completion
    assert whole.token_ids is not sample.completion.token_ids


@pytest.mark.parametrize("spells_out", [False, True])
def test_text_is_the_same_whenever_it_is_made(make, tokenizer, spells_out):
    """Without a stop string it is made when it is asked for; the end token is no part of it."""
    sample, ids = make(stop=["never"] if spells_out else ()), tokenizer.encode("Once upon a time").ids
    for token_id in ids[:3]:
        sample.accept(step([token_id]))
    first = sample.news(whole=True)
    assert (first.text, first.token_ids) == (tokenizer.decode(ids[:3]), ids[:3])
    for token_id in ids[3:]:
        sample.accept(step([token_id]))
    sample.accept(step([EOS], FinishReason.STOP, EOS))
    assert sample.completion.text == sample.news(whole=True).text == "Once upon a time"


def test_a_failed_request_raises(make):
    with pytest.raises(CoreRefusal, match="request r failed: out of luck") as refused:
        make().accept(step([], FinishReason.ERROR, error="out of luck"))
    assert isinstance(refused.value.error, RuntimeError)


def test_experts_are_those_of_the_tokens_that_count(make, tokenizer):
    ids = tokenizer.encode("Once upon a time").ids
    sample = make(stop=["upon"], return_routed_experts=True, routed_experts_prompt_start=1)
    output = step(ids)
    output.routed_experts = RoutedExperts(0, 1, 1, 1, bytes(range(len(ids) + 1)))
    assert sample.accept(output)
    num_tokens = 2 + len(sample.completion.token_ids)
    assert num_tokens < 2 + len(ids)
    assert sample.completion.routed_experts.ravel().tolist() == list(range(1, num_tokens - 1))
    assert make().completion.routed_experts is None
