"""A model that drafts for itself is always right, if its KV and its random numbers are."""

import json
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.gpu_worker.sampler.device.host_draw import HostKernels, make_device_sampler
from tests.gpu_worker.speculation.steps import BLOCK_SIZE, DEMO_MODEL, NUM_BLOCKS, Driver
from tests.gpu_worker.speculation.test_verify import NUM_TOKENS, PLAIN, STATEFUL, params
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.cache import make_kv_pool
from tokenloom.gpu_worker.attention.grouped_backend import PoolLayers
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.host.sampler import Sampler
from tokenloom.gpu_worker.speculation.drafting import Drafting
from tokenloom.gpu_worker.speculation.model_proposer import _draw_on_device, _probabilities
from tokenloom.gpu_worker.speculation.rejection import RejectionSampler

CPU = torch.device("cpu")


def make_backend(config):
    return make_attention_backend("auto", config, BLOCK_SIZE, CPU)


def load(model, method, folder="", **entries):
    """``folder``: in the demo model's."""
    config = SpeculativeConfig(method=method, model=str(DEMO_MODEL / folder), **entries)
    return Drafting(config, ModelLoader("float32"), lambda: model)


def make_driver(model, method, folder="", **entries):
    drafting = load(model, method, folder, **entries)
    return Driver(model, lambda batch: drafting.make(batch, make_backend, NUM_BLOCKS, BLOCK_SIZE, None))


@pytest.fixture(scope="module")
def truth(model):
    return Driver(model).generate(PLAIN | STATEFUL, NUM_TOKENS)


def test_a_model_drafts_for_itself_without_a_mistake(model, truth):
    driver = make_driver(model, "draft_model")
    driver.proposer.least_confidence = 0.0
    outputs = driver.generate(PLAIN, NUM_TOKENS, wanted=5)
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == {name: truth[name] for name in PLAIN}
    assert driver.steps == 1 + -(-(NUM_TOKENS - 1) // 6)


class Counting(HostKernels):
    """Counts the rows that are drawn."""

    num_drawn = 0

    def draw(self, logits, columns):
        self.num_drawn += len(logits)
        return super().draw(logits, columns)


@pytest.mark.parametrize(("requests", "on_device"), [(PLAIN, True), (PLAIN | STATEFUL, False)])
def test_a_device_draws_drafts_where_their_logits_are(requests, on_device, model, truth):
    """Unless a request changes its logits, which the host does."""
    drafting, kernels = load(model, "draft_model"), Counting()
    sampler = DeviceSampler(kernels)
    where = (NUM_BLOCKS, BLOCK_SIZE, None)
    driver = Driver(model, lambda batch: drafting.make(batch, make_backend, *where, device_sampler=sampler))
    driver.proposer.least_confidence = 0.0
    outputs = driver.generate(requests, NUM_TOKENS, wanted=5)
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == {name: truth[name] for name in requests}
    if on_device:
        assert driver.steps == 1 + -(-(NUM_TOKENS - 1) // 6), "every draft is right"
        assert kernels.num_drawn >= driver.accepted > 0
    else:
        assert kernels.num_drawn == 0


def test_a_draft_s_probability_is_the_host_s():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    logits[3] = float("nan")
    asked = [params(seed) for seed in range(4)]
    tokens, shares = _draw_on_device(make_device_sampler(), logits.clone(), asked, np.arange(4))
    expected = np.maximum(Sampler().sample(logits.numpy().copy(), asked, np.arange(4)), 0)
    assert tokens.tolist() == expected.tolist()
    np.testing.assert_allclose(shares, _probabilities(logits.numpy().copy(), expected), rtol=1e-5)


@pytest.mark.parametrize(("method", "folder", "least"), [("draft_model", "draft", 0.3), ("eagle", "eagle", 0.2)])
def test_the_demo_models_drafts_change_no_token(model, truth, method, folder, least):
    driver = make_driver(model, method, folder)
    outputs = driver.generate(PLAIN | STATEFUL, NUM_TOKENS, wanted=3)
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == truth
    driver.proposed = driver.accepted = 0
    story = [1, *model_tokens("user\nTell me a story about a dragon."), 2]
    outputs = driver.generate({"story": (story, params(1))}, 60, wanted=3)
    assert driver.accepted > least * driver.proposed > 0
    assert outputs["story"][:60] == Driver(model).generate({"story": (story, params(1))}, 60)["story"]


def model_tokens(text):
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids


class Caches:
    """Compares what a drafter wrote for a request with what it writes for the same tokens in one step."""

    def __init__(self, driver):
        self.caches = driver.proposer._kv_caches

    def written(self, num_tokens):
        blocks = -(-num_tokens // BLOCK_SIZE)
        return [
            cache[:, :blocks].transpose(2, 3).reshape(2, blocks * BLOCK_SIZE, -1)[:, :num_tokens].clone()
            for cache in self.caches
        ]


@pytest.mark.parametrize(
    ("method", "folder", "request_name"),
    [("draft_model", "draft", "filtered"), ("draft_model", "draft", "greedy"), ("eagle", "eagle", "filtered")],
)
def test_every_computed_token_has_the_drafters_kv(model, method, folder, request_name):
    """Blocks may be hit by another request, or sent: nothing may be missing, whatever drafts were proposed before."""
    prompt, sampling = PLAIN[request_name]
    driver = make_driver(model, method, folder)
    wanted = iter([3, 0, 0, 2, 3, 3, 0, 3, 0, 0, 0, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    execute = driver.runner.execute

    def vary(step):
        if step.num_scheduled_tokens:
            step.num_drafts_wanted = dict.fromkeys(step.num_scheduled_tokens, next(wanted))
        execute(step)

    driver.runner.execute = vary
    tokens = driver.generate({"a": (prompt, sampling)}, 20)["a"]
    found = Caches(driver).written(len(prompt) + 19)
    at_once = make_driver(model, method, folder)
    at_once.generate({"a": (prompt + tokens[:19], sampling)}, 1)
    for one, other in zip(found, Caches(at_once).written(len(prompt) + 19), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-4)


def test_drafting_ends_where_it_is_unlikely_to_be_right(model):
    drafts = []
    for least in (0.0, 0.4, 1.1):
        driver = make_driver(model, "draft_model")
        driver.proposer.least_confidence = least
        driver.generate({"a": PLAIN["drawn"]}, 1, wanted=6)
        drafts.append(driver.proposed)
    assert drafts[0] == 6
    assert 1 <= drafts[1] < 6
    assert drafts[2] == 1


def test_drafts_stay_within_the_blocks_of_a_request(model):
    driver = make_driver(model, "draft_model")
    driver.proposer.least_confidence = 0.0
    driver._blocks = lambda place: [place]
    prompt = PLAIN["drawn"][0] * 5  # 15 tokens: the block holds one more
    driver.generate({"a": (prompt[:13], PLAIN["greedy"][1])}, 1, wanted=6)
    assert driver.proposed == 3  # the KV of the drawn token and of two drafts
    driver.generate({"a": ([*prompt[:15], 4], PLAIN["greedy"][1])}, 1, wanted=6)
    assert driver.proposed == 3


def test_rejection_learns_what_drafts_were_drawn_from(model):
    driver = make_driver(model, "draft_model", "draft", rejection_sample_method="probabilistic")
    rejection = driver.runner._speculation._rejection
    assert isinstance(rejection, RejectionSampler)
    driver.proposer.least_confidence = 0.0
    found, keep = {}, rejection.keep
    rejection.keep = lambda req_id, drawn_from: (keep(req_id, drawn_from), found.update({req_id: drawn_from}))
    driver.generate({"a": PLAIN["drawn"], "b": PLAIN["greedy"]}, 1, wanted=4)
    assert [each.sum() for each in found["a"]] == pytest.approx([1.0] * 4)
    assert not found["b"]
    assert not rejection._proposed, "the requests ended"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"vocab_size": 2047}, "vocabulary has 2047 tokens and the model's 2048"),
        ({"max_position_embeddings": 1024}, "context has 1024 tokens and the model's 2048"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model, tmp_path, entries, message):
    shutil.copytree(DEMO_MODEL / "draft", tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    with pytest.raises(ValueError, match=message):
        load(model, "draft_model", tmp_path / "draft")


def test_a_head_of_another_size_is_refused(model):
    with pytest.raises(ValueError, match="2 layers of size 64; it needs one of the model's size, 256"):
        load(model, "eagle", "draft")


def test_the_layers_lie_behind_the_models(model):
    drafting = load(model, "draft_model", "draft")
    assert drafting.kv_layout("HND/fp32/4x2x64/16", 16) == "HND/fp32/4x2x64/16+HND/fp32/2x1x32/16"
    assert drafting.kv_bytes_per_token == 2 * 2 * 32 * 4
    memory = PoolMemory.allocate(3 * BLOCK_SIZE * (model.config.kv_bytes_per_token + 512), shared=False)
    layers = PoolLayers(model.config, [])
    proposer, _ = drafting.make(InputBatch(2, 64, BLOCK_SIZE), make_backend, 3, BLOCK_SIZE, memory, layers)
    pool = drafting.kv_pool(make_kv_pool(model.config, 3, BLOCK_SIZE, memory), 3, BLOCK_SIZE, layers)
    proposer._kv_caches[1][0, 2] = 7.0  # the keys of the last layer
    region = pool.regions[-2]
    start = region.offset + 2 * region.block_bytes
    assert np.frombuffer(memory.buffer[start : start + region.block_bytes], dtype=np.float32).tolist() == [7.0] * 512
    assert np.count_nonzero(np.frombuffer(memory.buffer, dtype=np.float32)) == 512


def test_dropped_weights_come_back(model):
    drafting = load(model, "draft_model", "draft")
    proposer, _ = drafting.make(InputBatch(2, 64, BLOCK_SIZE), make_backend, 8, BLOCK_SIZE, None)
    before = proposer.drafter
    drafting.drop()
    assert proposer.drafter is None
    drafting.restore()
    assert proposer.drafter is not None
    assert proposer.drafter is not before


def test_requests_that_end_are_forgotten(model):
    driver = make_driver(model, "eagle", "eagle")
    driver.generate(PLAIN, 3, wanted=2)
    ended = SchedulerOutput([], CachedRequestData([], [], [], {}), {}, 0, list(PLAIN), [])
    driver.runner.execute(ended)
    assert not driver.proposer._computed
    assert not driver.proposer.drafter._before
