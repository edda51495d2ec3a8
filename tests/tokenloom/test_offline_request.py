"""What the offline API makes of an engine core's outputs."""

import pytest

from tokenloom.engine_core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PrefillStats
from tokenloom.engine_core.sampling_params import SamplingParams
from tokenloom.offline_request import OfflineRequest
from tokenloom.services.output_processor.detokenizer import Detokenizer, Vocabulary
from tokenloom.services.runtime.checkpoint import DEMO_MODEL, load_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
def make(tokenizer):
    def make(stop=(), text=True):
        request = EngineCoreRequest("r", [5, 6], SamplingParams(max_tokens=9, seed=1))
        detokenizer = Detokenizer(Vocabulary(tokenizer), [5, 6], stop=stop) if text else None
        return OfflineRequest(request, None, detokenizer, (EOS,))

    return make


def step(token_ids, reason=None, stop_token_id=None, stats=None, error=""):
    return EngineCoreOutput("r", token_ids, 0, reason, stop_token_id, stats, error)


def test_tokens_and_text_come_together(make, tokenizer):
    request, ids = make(), tokenizer.encode("Once upon a time").ids
    assert not request.accept(step(ids[:1], stats=PrefillStats(2, 1, 10, 20)))
    assert (request.num_tokens, request.output.finished, request.output.num_cached_tokens) == (1, False, 1)
    request.accept(step(ids[1:], FinishReason.LENGTH))
    (completion,) = request.output.outputs
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("Once upon a time", "length", ids)
    assert request.output.finished


def test_a_stop_string_cuts_tokens_and_text(make, tokenizer):
    request, ids = make(stop=["upon"]), tokenizer.encode("Once upon a time").ids
    assert request.accept(step(ids))
    (completion,) = request.output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Once ", "stop", "upon")
    assert tokenizer.decode(completion.token_ids).endswith("upon")


@pytest.mark.parametrize(("token_id", "reason"), [(EOS, None), (17, 17)])
def test_the_models_own_end_is_no_stop_reason(make, token_id, reason):
    request = make()
    request.accept(step([9, token_id], FinishReason.STOP, token_id))
    (completion,) = request.output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
    assert completion.token_ids == [9, token_id]


def test_without_text(make):
    request = make(text=False)
    request.accept(step([9], FinishReason.LENGTH))
    assert request.output.outputs[0].text == ""


def test_a_failed_request_raises(make):
    with pytest.raises(RuntimeError, match="request r failed: out of luck"):
        make().accept(step([], FinishReason.ERROR, error="out of luck"))
