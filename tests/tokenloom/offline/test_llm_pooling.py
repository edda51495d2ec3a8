"""Embeddings, classes and scores in the offline API, over the hash worker."""

import json

import numpy as np
import pytest
import torch
from tokenizers import processors

from tests.parity.embeddings.layouts import LAYOUTS
from tokenloom import LLM, PoolingParams, SamplingParams
from tokenloom.engine_core.data.core_params import CorePoolingParams as CoreParams
from tokenloom.engine_core.data.core_params import PoolingTask
from tokenloom.engine_core.fake_workers.hash_row import hash_pooled
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.offline.pooling import PoolingPrompts
from tokenloom.v1 import types_pb2


@pytest.fixture(scope="module")
def llm():
    llm = LLM("tokenloom-demo", worker="hash", num_gpu_blocks_override=512)
    yield llm
    llm.close()


def expected(token_ids, task, **params):
    prefix = np.column_stack((token_ids, np.arange(len(token_ids)))).astype(np.int32)
    return hash_pooled(prefix, CoreParams(task, **params))


def test_embeds_2048_inputs_in_one_call_in_order(llm):
    prompts = [[10 + number % 500, 7, 8, number // 500] for number in range(2048)]
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs.embedding == expected(prompt, PoolingTask.EMBED).tolist()
    assert outputs[0].outputs.hidden_size == 8


def test_encode_returns_what_is_asked_for(llm):
    ids = llm.get_tokenizer().encode("Once upon a time").ids
    (vectors,) = llm.encode("Once upon a time", pooling_task="token_embed", use_tqdm=False)
    assert torch.equal(vectors.outputs.data, torch.from_numpy(expected(ids, PoolingTask.TOKEN_EMBED)))
    (short,) = llm.encode("Once upon a time", PoolingParams(dimensions=3, task="embed"), use_tqdm=False)
    assert short.outputs.data.tolist() == expected(ids, PoolingTask.EMBED, dimensions=3).tolist()
    (cut,) = llm.encode("Once upon a time", pooling_task="embed", truncate_prompt_tokens=2, use_tqdm=False)
    assert cut.prompt_token_ids == ids[:2]


def test_classifies_and_scores(llm):
    (classes,) = llm.classify("Once", use_tqdm=False)
    assert classes.outputs.num_classes == 2
    assert sum(classes.outputs.probs) == pytest.approx(1)
    scores = llm.score("Once", ["upon", "a", "time"], use_tqdm=False)
    ids = llm.get_tokenizer().encode("Once", "time").ids
    assert scores[2].outputs.score == pytest.approx(float(expected(ids, PoolingTask.SCORE)))


def test_wrong_requests_are_value_errors(llm):
    with pytest.raises(ValueError, match="pooling_task is not set"):
        llm.encode("Once", use_tqdm=False)
    with pytest.raises(ValueError, match="dimensions is 9; this model's vectors have 8"):
        llm.embed("Once", pooling_params=PoolingParams(dimensions=9), use_tqdm=False)
    with pytest.raises(ValueError, match="score: 2 texts and 3 texts"):
        llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)


def test_a_wrong_prompt_is_refused_alone(llm):
    ids = llm.get_tokenizer().encode("Once").ids
    once, empty, long, last = llm.embed(["Once", "", [5] * 5000, "Once"], use_tqdm=False)
    assert once.outputs.embedding == last.outputs.embedding == expected(ids, PoolingTask.EMBED).tolist()
    assert (empty.outputs, long.outputs) == (None, None)
    assert "prompt is empty" in empty.error
    assert "prompt has 5000" in long.error
    good, bad = llm.score("Once", ["upon", "\ud83d"], use_tqdm=False)
    assert (good.error, bad.outputs) == (None, None)
    assert "half a surrogate pair" in bad.error
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.classify(["", ""], use_tqdm=False)


def test_model_that_only_pools_generates_nothing():
    llm = LLM("tokenloom-demo", worker="hash", runner="pooling", num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match="this model generates no tokens; its pooling tasks are: embed, classify"):
        llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
    llm.close()


def test_prompts_by_name(llm):
    """The demo model has the names of every such checkpoint, without texts."""
    (plain,), (named,) = (llm.embed("Once", prompt_name=name, use_tqdm=False) for name in (None, "query"))
    assert named.prompt_token_ids == plain.prompt_token_ids
    with pytest.raises(ValueError, match="the model's prompts are: document, query"):
        llm.embed("Once upon a time", prompt_name="passage", use_tqdm=False)


@pytest.mark.parametrize(("given", "task"), [([5, 6], "embed"), ("a cat", "classify")])
def test_a_prompt_is_for_texts_that_become_vectors(tmp_path, given, task):
    LAYOUTS["e5"].save(tmp_path)
    llm = LLM(str(tmp_path), worker="hash", num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match="prompt_name is for texts"):
        llm.encode([given], pooling_task=task, prompt_name="query", use_tqdm=False)
    (found,) = llm.embed("a cat", prompt_name="passage", use_tqdm=False)
    assert llm.get_tokenizer().decode(found.prompt_token_ids) == "[CLS] passage : a cat [SEP]"
    llm.close()


@pytest.mark.parametrize(("most", "kept"), [(4, "[CLS] query : [SEP]"), (-1, "[CLS] query : a cat a cat [SEP]")])
def test_a_text_that_is_cut_keeps_its_special_tokens(tmp_path, most, kept):
    """Their states count: a text without its [SEP] has another vector."""
    LAYOUTS["e5"].save(tmp_path)
    settings = tmp_path / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": 8}))
    llm = LLM(str(tmp_path), worker="hash", num_gpu_blocks_override=64)
    (found,) = llm.embed("a cat a cat a cat", truncate_prompt_tokens=most, use_tqdm=False)
    assert llm.get_tokenizer().decode(found.prompt_token_ids, skip_special_tokens=False) == kept
    llm.close()


def test_texts_that_are_classified_or_compared_are_cut_in_the_same_way(tmp_path):
    LAYOUTS["e5"].save(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), "a cat a cat a cat a cat"
    first, last = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", last), ("[CLS]", first))
    prompts = PoolingPrompts(tokenizer, types_pb2.ModelLimits(max_model_len=64))
    (one,) = prompts.read([text], ["classify"], 6, None)
    (pair,) = prompts.pairs([("a cat", text)], PoolingParams(), 6)
    for ids in (one.token_ids, pair.samples[0].core_request.prompt_token_ids):
        assert (len(ids), ids[0], ids[-1]) == (6, first, last)
