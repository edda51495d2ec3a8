"""An EAGLE-3 head computes what its paper's equations say, from the inputs of several layers of the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.speculation.eagle3_checkpoint import NUM_LAYERS, compute_head, write_head, write_model
from tests.parity.engine import Engine
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig, WorkerConfig
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.speculation.drafting import Drafting
from tokenloom.gpu_worker.speculation.eagle import Eagle3Head

CPU = torch.device("cpu")
PROMPTS = [[3 + (index * 7 + position * 5) % 60 for position in range(n)] for index, n in enumerate((70, 3, 40, 17))]
LIMITS = [40, 30, 24, 33]


def eagle3(path: Path, num_drafts: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig("eagle3", num_drafts, str(path))


def step(config: Any, length: int) -> tuple[Any, Any]:
    """Return caches and a plan for one prompt."""
    backend, places = make_attention_backend("auto", config, 16, CPU), np.arange(length)
    plan = backend.plan(np.array([0, length]), np.array([length]), np.array([[0, 1]], np.int32), places)
    return backend.allocate(2, None), plan


@pytest.mark.parametrize(
    ("layers", "entries"),
    [
        ((2, 4, 5), {}),
        ((0, 7), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7], "use_aux_hidden_state": True}}),
        ((1, 2, 3, 6), {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 6], "norm_before_residual": True}),
    ],
)
@torch.inference_mode()
def test_states_and_logits(layers: tuple[int, ...], entries: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors = write_head(tmp_path / "head", model, num_states=len(layers), **entries)
    loader, length = ModelLoader("float32", ops=CPUOps()), 21
    target = loader.load(tmp_path / "model")
    drafting = Drafting(eagle3(tmp_path / "head"), loader, lambda: target)
    head = drafting._drafter
    assert isinstance(head, Eagle3Head)
    ids = torch.randint(3, 60, (length + 1,), generator=torch.Generator().manual_seed(1))
    found = target.forward(ids[:-1], torch.arange(length), *step(target.config, length))
    expected = model.model(ids[None, :-1], output_hidden_states=True)
    torch.testing.assert_close(found, expected.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    states = torch.cat([expected.hidden_states[layer][0] for layer in layers], -1)
    torch.testing.assert_close(target.kept_states, states, rtol=1e-4, atol=1e-4)

    norms = bool(entries.get("norm_before_residual"))
    own, logits = compute_head(tensors, model.model.embed_tokens(ids[1:]), states, norms_residual=norms)
    assert drafting.kv_config is not None
    found = head.forward(ids[1:], torch.arange(length), states, *step(drafting.kv_config, length))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.compute_logits(found), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)])
def test_tokens_are_those_without_drafts(shape: tuple[int, int], sampling: dict[str, float], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", is_sharp=True)
    write_head(tmp_path / "head", model, is_sharp=True)
    settings: dict[str, Any] = {"budget": 64, "max_num_seqs": 4, "max_model_len": 128, "prefix_caching": True}
    expected = Engine(tmp_path / "model", num_blocks=80, **settings).generate(PROMPTS, LIMITS, **sampling)
    if shape != (1, 1):
        settings |= {"parallel": parallel(*shape), "executor": lambda config: RankThreads(config, tmp_path)}
    engine = Engine(tmp_path / "model", num_blocks=12, speculative=eagle3(tmp_path / "head"), **settings)
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    for _ in range(2):
        assert engine.generate(PROMPTS, LIMITS, **sampling) == expected
    assert engine.stats.num_preemptions
    assert drafts.stats().num_accepted_tokens > 60
    engine.core.shutdown()


def test_sleep_and_other_weights(tmp_path: Path) -> None:
    """The head reads the states of the model that is there."""
    model = write_model(tmp_path / "model", is_sharp=True)
    write_head(tmp_path / "head", model, is_sharp=True)
    engine = Engine(tmp_path / "model", num_blocks=80, max_model_len=128, speculative=eagle3(tmp_path / "head", 1))
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None
    expected, counts = engine.generate(PROMPTS, LIMITS), [drafts.stats().num_accepted_tokens]
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    for change in (
        lambda: (worker.sleep(1), worker.wake_up(["weights", "kv_cache"])),
        lambda: worker.reload_weights(str(tmp_path / "model")),
    ):
        change()
        assert engine.generate(PROMPTS, LIMITS) == expected
        counts.append(drafts.stats().num_accepted_tokens)
    assert counts[0] > 30
    assert counts[2] - counts[1] == counts[1] - counts[0] == counts[0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1: an EAGLE-3 head has one layer"),
        ({"vocab_size": 63}, "vocab_size of the head is 63; it must be the model's 64"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 8]},
            rf"layers \[2, 8\]: they must be .* of the model's {NUM_LAYERS}",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [3]}, "at least two different ones in order"),
        ({"architectures": ["LlamaModel"]}, "architectures is not that of an EAGLE-3 head"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config must be an object with"),
        ({"new_entry": 1}, "new_entry"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_start(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_head(tmp_path / "head", write_model(tmp_path / "model"), **entries)
    speculative = eagle3(tmp_path / "head")
    config = EngineConfig(worker=WorkerConfig(model=str(tmp_path / "model")), speculative=speculative)
    with pytest.raises(ValueError, match=message):
        served_how(config, has_gpu=False)
    loader = ModelLoader("float32")
    target = loader.load(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        Drafting(speculative, loader, lambda: target)


def test_outputs_must_be_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_head(tmp_path / "head", model)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] += 64
    save_file(tensors, file)
    loader = ModelLoader("float32")
    target = loader.load(tmp_path / "model")
    with pytest.raises(ValueError, match="d2t: its outputs must be different tokens below 64"):
        Drafting(eagle3(tmp_path / "head"), loader, lambda: target)
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_vocab_size": 47}))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[48, 64\]"):
        Drafting(eagle3(tmp_path / "head"), loader, lambda: target)
