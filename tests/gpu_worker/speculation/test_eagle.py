"""The head that a model's own checkpoint brings computes what its class's layers do between its norms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu_worker.speculation.mtp_checkpoint import OWN_HEADS, add_head
from tests.parity.state_checkpoints import make_model
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig, WorkerConfig
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.speculation.drafting import Drafting
from tokenloom.gpu_worker.speculation.eagle import MtpHead

CPU = torch.device("cpu")
MTP = SpeculativeConfig("mtp", 3)


def write(kind: str, path: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    model = make_model(kind, **OWN_HEADS.get(kind, {}))
    model.save_pretrained(path)
    return model, *add_head(path, model)


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (1 + weight)


@pytest.mark.parametrize("kind", OWN_HEADS)
@torch.inference_mode()
def test_logits_are_those_of_the_layer_between_norms(kind: str, tmp_path: Path) -> None:
    model, whole, others = write(kind, tmp_path)
    loader, num_tokens, eps = ModelLoader("float32", ops=CPUOps()), 21, model.config.rms_norm_eps
    target = loader.load(tmp_path)
    drafting = Drafting(MTP, loader, lambda: target, target_path=lambda: tmp_path)
    head, config = drafting._drafter, drafting.kv_config
    assert isinstance(head, MtpHead)
    assert config is not None
    ids = torch.randint(3, 500, (num_tokens,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(2))

    of_token = norm(model.model.embed_tokens(ids), others["pre_fc_norm_embedding.weight"], eps)
    of_state = norm(states, others["pre_fc_norm_hidden.weight"], eps)
    joined = torch.cat((of_token, of_state), -1) @ others["fc.weight"].T
    whole.model.norm.weight.copy_(others["norm.weight"])
    expected = model.lm_head(whole.model(inputs_embeds=joined[None]).last_hidden_state)[0]

    backend, places = make_attention_backend("auto", config, 16, CPU), np.arange(num_tokens)
    plan = backend.plan(np.array([0, num_tokens]), np.array([num_tokens]), np.array([[0, 1]], np.int32), places)
    found = head.forward(ids, torch.arange(num_tokens), states, backend.allocate(2, None), plan)
    torch.testing.assert_close(head.compute_logits(found), expected, rtol=1e-4, atol=1e-4)


def engine_config(path: Path, method: SpeculativeConfig = MTP) -> EngineConfig:
    return EngineConfig(worker=WorkerConfig(model=str(path)), speculative=method)


def test_what_has_no_head_is_refused_before_a_start(tmp_path: Path) -> None:
    _, *_ = write("qwen3_5_text", tmp_path / "with")
    assert served_how(engine_config(tmp_path / "with"), has_gpu=False).by == "built in"
    make_model("qwen3_5_text").save_pretrained(tmp_path / "without")
    with pytest.raises(ValueError, match=r"has no tensor mtp\.fc\.weight"):
        served_how(engine_config(tmp_path / "without"), has_gpu=False)
    make_model("lfm2").save_pretrained(tmp_path / "lfm2")
    with pytest.raises(ValueError, match=r"the method mtp is for Qwen3-Next, Qwen3\.5"):
        served_how(engine_config(tmp_path / "lfm2"), has_gpu=False)
    drafting = SpeculativeConfig("draft_model", 3, str(tmp_path / "lfm2"))
    with pytest.raises(ValueError, match=r"speculative_config\.model: layers of lfm2 keep a state between tokens"):
        served_how(engine_config(tmp_path / "with", drafting), has_gpu=False)
