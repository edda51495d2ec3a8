"""Recorded steps of what drafts compute the drafts of its operations."""

import pytest

from tests.gpu_worker.cpu_graphs.steps import have_logits
from tests.gpu_worker.speculation.steps import DEMO_MODEL, NUM_BLOCKS, Driver
from tests.gpu_worker.speculation.test_model_proposer import make_backend
from tests.gpu_worker.speculation.test_verify import NUM_TOKENS, PLAIN
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.speculation.drafter import MOST_TOKENS
from tokenloom.gpu_worker.speculation.drafting import Drafting


def drafts_of(driver):
    """Return the drafts of every step of some requests, each for itself and all together."""
    found, propose = [], driver.proposer.propose

    def note(*args):
        found.append(propose(*args))
        return found[-1]

    driver.proposer.propose = note
    driver.proposer.drafter.at_once = None
    for requests in ({"greedy": PLAIN["greedy"]}, PLAIN):
        driver.generate(requests, NUM_TOKENS, wanted=4)
    return found


def make_driver(folder, dtype, *, records):
    loader = ModelLoader(dtype, ops=CPUOps())
    target = loader.load(DEMO_MODEL)
    config = SpeculativeConfig(method="eagle" if folder == "eagle" else "draft_model", model=str(DEMO_MODEL / folder))
    drafting = Drafting(config, loader, lambda: target)
    return Driver(target, lambda batch: drafting.make(batch, make_backend, NUM_BLOCKS, 16, None, records=records))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", ["draft", "eagle"])
def test_recordings_draft_the_same(folder, dtype):
    expected = make_driver(folder, dtype, records=False)
    recorded = make_driver(folder, dtype, records=True)
    assert expected.proposer._recorded is None
    assert drafts_of(recorded) == drafts_of(expected)
    recordings = recorded.proposer._recorded
    assert 2 <= recordings.num_recordings <= MOST_TOKENS
    assert have_logits(recordings._recorded)


def test_other_weights_and_caches_have_other_recordings():
    driver = make_driver("draft", "float32", records=True)
    proposer = driver.proposer
    for change in (
        lambda: setattr(proposer, "drafter", proposer.drafter),
        lambda: (proposer.drop_kv_caches(), proposer.make_kv_caches()),
    ):
        drafts_of(driver)
        assert proposer._recorded.num_recordings
        change()
        assert not proposer._recorded.num_recordings
