"""One call drafts what the draft model drafts step by step."""

from dataclasses import replace

import pytest
import torch
import transformers

from tests.gpu_worker.speculation.steps import DEMO_MODEL, Driver
from tests.gpu_worker.speculation.test_model_proposer import NUM_BLOCKS, make_backend, make_driver
from tests.gpu_worker.speculation.test_verify import NUM_TOKENS, PLAIN, STATEFUL, params
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.rope_config import RopeConfig
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.speculation.drafting import Drafting
from tokenloom.gpu_worker.speculation.greedy_drafts import MOST_WEIGHTS, DraftRange, fits

GREEDY = {"short": PLAIN["greedy"], "long": (list(range(50, 90)), params(3))}


def proposals(driver, requests, num_tokens=NUM_TOKENS):
    """Return the drafts of every step, and how many tokens each forward pass of the draft model computed."""
    found, lengths = [], []
    propose, forward = driver.proposer.propose, driver.proposer._forward

    def record(*args):
        found.append(propose(*args))
        return found[-1]

    def count(inputs, states):
        lengths.append(len(inputs.token_ids))
        return forward(inputs, states)

    driver.proposer.propose, driver.proposer._forward = record, count
    driver.generate(requests, num_tokens, wanted=4)
    return found, lengths


@pytest.mark.parametrize(("method", "folder"), [("draft_model", "draft"), ("eagle", "eagle")])
def test_a_call_drafts_what_the_model_drafts(model, method, folder):
    driver = make_driver(model, method, folder)
    driver.proposer.drafter.at_once.most_tokens = 32
    found, at_once = proposals(driver, GREEDY)
    driver = make_driver(model, method, folder)
    driver.proposer.drafter.at_once = None
    expected, step_by_step = proposals(driver, GREEDY)
    assert found == expected
    assert sum(len(drafts) for step in found for drafts in step.values()) > NUM_TOKENS
    assert at_once == [48]  # the prompts, each with the token after it
    assert len(step_by_step) > len(found)


def test_one_call_computes_short_prompts_too(model):
    found, lengths = proposals(make_driver(model, "draft_model", "draft"), GREEDY)
    assert not lengths
    driver = make_driver(model, "draft_model", "draft")
    driver.proposer.drafter.at_once.most_tokens = 32
    assert found == proposals(driver, GREEDY)[0]


def test_drawn_and_penalized_tokens_are_drafted_step_by_step(model):
    for name, request in (PLAIN | STATEFUL).items():
        _, lengths = proposals(make_driver(model, "draft_model", "draft"), {name: request}, 6)
        assert (len(lengths) <= 1) == (name == "greedy"), name


def test_more_than_a_few_requests_are_drafted_together(model):
    _, lengths = proposals(make_driver(model, "draft_model", "draft"), {str(n): GREEDY["short"] for n in range(8)}, 6)
    assert not lengths
    driver = make_driver(model, "draft_model", "draft")
    assert driver.proposer._is_greedy([DraftRange(0, 0, 1, 0)] * 8)
    assert not driver.proposer._is_greedy([DraftRange(0, 0, 1, 0)] * 9)


def test_a_model_of_another_shape_drafts_for_itself(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=501, hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    loader = ModelLoader("float32")
    model = loader.load(tmp_path)
    drafting = Drafting(SpeculativeConfig(method="draft_model", model=str(tmp_path)), loader, lambda: model)
    driver = Driver(model, lambda batch: drafting.make(batch, make_backend, NUM_BLOCKS, 16, None))
    driver.proposer.least_confidence = 0.0
    outputs = driver.generate(GREEDY, NUM_TOKENS, wanted=5)
    expected = Driver(model).generate(GREEDY, NUM_TOKENS)
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == expected
    assert driver.steps == 1 + -(-(NUM_TOKENS - 1) // 6)


def test_bfloat16_caches(model):
    loader = ModelLoader("bfloat16")
    target = loader.load(DEMO_MODEL)
    config = SpeculativeConfig(method="draft_model", model=str(DEMO_MODEL / "draft"))
    drafting = Drafting(config, loader, lambda: target)
    shares = []
    for is_quick in (True, False):
        driver = Driver(target, lambda batch: drafting.make(batch, make_backend, NUM_BLOCKS, 16, None))
        if not is_quick:
            driver.proposer.drafter.at_once = None
        driver.generate(GREEDY, NUM_TOKENS, wanted=4)
        shares.append(driver.accepted / driver.proposed)
    assert shares[0] == pytest.approx(shares[1], abs=0.1)


def test_only_small_plain_models_draft_in_one_call(model):
    config = load_model_config(DEMO_MODEL / "draft", "bfloat16")
    assert fits(config)
    for changed in (
        {"kv_cache_dtype": "int8"},
        {"hidden_act": "gelu_new"},
        {"qkv_bias": True},
        {"logit_softcap": 30.0},
        {"sliding_windows": (16, None)},
        {"ropes": (RopeConfig(32), RopeConfig(32, 500.0))},
        {"family": "gemma2"},
        {"family": "gpt2"},
        {"quantization": "int4"},
        {"vocab_size": MOST_WEIGHTS // 32},
    ):
        assert not fits(replace(config, **changed)), changed
    head = load_model_config(DEMO_MODEL / "eagle", "bfloat16")
    assert fits(head, is_head=True)
    assert not fits(replace(head, vocab_size=MOST_WEIGHTS // 256), is_head=True)
