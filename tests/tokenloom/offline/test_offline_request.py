"""A prompt with two samples: what it collects, and what a stream of it tells when."""

import pytest

from tokenloom import RequestOutputKind
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprobs,
    PrefillStats,
)
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline.offline_request import OfflineRequest, OfflineSample, TextSettings
from tokenloom.services.output_processor.text.detokenizer import Detokenizer, OutputText, Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(load_tokenizer(DEMO_MODEL))


@pytest.fixture
def make(vocabulary):
    def make(**stream):
        core_request = EngineCoreRequest("r", [5, 6], CoreSamplingParams(max_tokens=9, seed=1))
        settings = [TextSettings(OutputText(Detokenizer(vocabulary, [5, 6]), ()), vocabulary) for _ in range(2)]
        samples = [OfflineSample(core_request, index, text) for index, text in enumerate(settings)]
        return OfflineRequest("r", None, samples, **stream)

    return make


def accept(request, index, *token_ids, reason=None, **fields):
    return request.accept(request.samples[index], EngineCoreOutput("r", list(token_ids), 0, reason, **fields))


def told(request):
    """(sample, tokens, finished) of each output."""
    return [(output.outputs[0].index, output.outputs[0].token_ids, output.finished) for output in request.news()]


def test_it_ends_with_its_last_sample(make):
    request = make()
    accept(request, 0, 7, prefill_stats=PrefillStats(2, 1, 10, 20))
    accept(request, 1, 8, reason=FinishReason.LENGTH, prefill_stats=PrefillStats(2, 2, 10, 20))
    assert not request.output.finished
    accept(request, 0, 9, reason=FinishReason.LENGTH)
    assert request.output.finished
    assert (request.num_tokens, request.output.num_cached_tokens) == (3, 1)
    assert [completion.token_ids for completion in request.output.outputs] == [[7, 9], [8]]


def test_the_prompts_logprobs_begin_with_none(make):
    request = make()
    accept(request, 0, 7, new_prompt_logprobs=Logprobs([-0.5], [2]))
    first, second = request.output.prompt_logprobs
    assert first is None
    assert (second[6].logprob, second[6].rank) == (-0.5, 2)


def test_deltas_and_wholes(make):
    for kind, last in ((RequestOutputKind.DELTA, [9]), (RequestOutputKind.CUMULATIVE, [7, 9])):
        request = make(output_kind=kind)
        accept(request, 0, 7)
        assert told(request) == [(0, [7], False)]
        assert told(request) == []
        accept(request, 0, 9)
        accept(request, 1, 8, reason=FinishReason.LENGTH)
        assert told(request) == [(0, last, False), (1, [8], False)]
        accept(request, 0, reason=FinishReason.ABORT)
        assert told(request) == [(0, [] if kind is RequestOutputKind.DELTA else [7, 9], True)]


def test_an_interval_spares_neither_the_first_nor_the_last(make):
    request = make(output_kind=RequestOutputKind.DELTA, stream_interval=3)
    lengths = []
    for token_id in range(7, 13):
        accept(request, 0, token_id, reason=FinishReason.LENGTH if token_id == 12 else None)
        lengths += [len(tokens) for _, tokens, _ in told(request)]
    assert lengths == [1, 3, 2]


def test_only_the_end(make):
    request = make(output_kind=RequestOutputKind.FINAL_ONLY)
    accept(request, 0, 7, reason=FinishReason.LENGTH)
    assert list(request.news()) == []
    accept(request, 1, 8, reason=FinishReason.LENGTH)
    assert list(request.news()) == [request.output]


def test_aborted(make):
    request = make()
    accept(request, 0, 7, reason=FinishReason.LENGTH)
    request.abort()
    assert [completion.finish_reason for completion in request.output.outputs] == ["length", "abort"]
    assert request.output.finished
