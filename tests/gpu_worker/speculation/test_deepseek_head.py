"""The head behind the last layer of a DeepSeek-V3 checkpoint computes what its class's layer does between its norms."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.speculation.test_eagle import MTP, engine_config
from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.gpu_worker.ops.cpu_ops import TokenwiseOps
from tokenloom.gpu_worker.speculation.drafting import Drafting
from tokenloom.gpu_worker.speculation.eagle import MtpHead

CPU = torch.device("cpu")
PROMPTS = [[3 + (index * 7 + position * 5) % 490 for position in range(n)] for index, n in enumerate((70, 3, 40))]
LIMITS = [30, 24, 33]


def write(directory: Path, *, is_sharp: bool = False) -> tuple[Path, Any, Any, dict[str, torch.Tensor]]:
    """Write a model with its head, under the names of deepseek-ai/DeepSeek-V3. ``is_sharp``: its layers add little, and
    the head predicts what follows from a token alone. Returns where, the model, the layer as a model of its own, and
    the tensors beside."""
    path = save_random("deepseek_v3", directory, **SMALL_CONFIGS["deepseek_v3"])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    values = {**model.config.to_dict(), "num_hidden_layers": 1, "first_k_dense_replace": 0}
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(type(model.config)(**values)).eval().requires_grad_(False)
    generator, size = torch.Generator().manual_seed(4), model.config.hidden_size
    others = {"eh_proj": torch.randn(size, 2 * size, generator=generator) * size**-0.5}
    others |= {
        name: 1 + 0.1 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    if is_sharp:
        others["eh_proj"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        others |= {"enorm": torch.ones(size), "shared_head.norm": model.model.norm.weight.clone()}
        for each, factor in ((model, 0.01), (whole, 0.0)):
            for name, parameter in each.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.mul_(factor)
        model.lm_head.weight.mul_(20)
    whole.save_pretrained(path / "head")
    model.save_pretrained(path)
    layer = f"model.layers.{model.config.num_hidden_layers}"
    own = load_file(path / "head" / "model.safetensors")
    tensors = load_file(path / "model.safetensors")
    tensors |= {
        name.replace("model.layers.0", layer): each for name, each in own.items() if name.startswith("model.layers.0.")
    }
    tensors |= {f"{layer}.{name}.weight": each for name, each in others.items()}
    tensors |= {f"{layer}.shared_head.head.weight": model.lm_head.weight.clone()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, model, whole, others


def drop_head(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    rest = {name: each for name, each in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(rest, path / "model.safetensors", {"format": "pt"})


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


@torch.inference_mode()
def test_logits_are_those_of_the_layer_between_norms(tmp_path: Path) -> None:
    path, model, whole, others = write(tmp_path)
    loader, num_tokens, eps = ModelLoader("float32", ops=TokenwiseOps()), 21, model.config.rms_norm_eps
    target = loader.load(path)
    drafting = Drafting(MTP, loader, lambda: target, target_path=lambda: path)
    head, config = drafting._drafter, drafting.kv_config
    assert isinstance(head, MtpHead)
    assert config is not None
    ids = torch.randint(3, 500, (num_tokens,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(num_tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(2))

    of_token = norm(model.model.embed_tokens(ids), others["enorm"], eps)
    joined = torch.cat((of_token, norm(states, others["hnorm"], eps)), -1) @ others["eh_proj"].T
    whole.model.norm.weight.copy_(others["shared_head.norm"])
    expected = model.lm_head(whole.model(inputs_embeds=joined[None]).last_hidden_state)[0]

    backend, places = make_attention_backend("auto", config, 16, CPU), np.arange(num_tokens)
    plan = backend.plan(np.array([0, num_tokens]), np.array([num_tokens]), np.array([[0, 1]], np.int32), places)
    found = head.forward(ids, torch.arange(num_tokens), states, backend.allocate(2, None), plan)
    torch.testing.assert_close(head.compute_logits(found), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_without_drafts(ranks: int, tmp_path: Path) -> None:
    path, *_ = write(tmp_path, is_sharp=True)
    settings: dict[str, Any] = {"budget": 64, "max_num_seqs": 4, "max_model_len": 128, "prefix_caching": True}
    expected = Engine(path, **settings).generate(PROMPTS, LIMITS)
    if ranks > 1:
        settings |= {"parallel": parallel(1, ranks), "executor": lambda config: RankThreads(config, tmp_path)}
    engine = Engine(path, speculative=MTP, **settings)
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    for _ in range(2):
        assert engine.generate(PROMPTS, LIMITS) == expected
    assert drafts.stats().num_accepted_tokens > 60
    engine.core.shutdown()


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    path, *_ = write(tmp_path)
    assert served_how(engine_config(path), has_gpu=False).by == "built in"
    drop_head(path)
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.2\.eh_proj\.weight"):
        served_how(engine_config(path), has_gpu=False)


def test_new_weights_without_the_head_are_refused_before_the_old_ones_go(tmp_path: Path) -> None:
    path, *_ = write(tmp_path / "old", is_sharp=True)
    new = tmp_path / "new"
    shutil.copytree(path, new)
    engine = Engine(path, speculative=MTP, budget=64, max_num_seqs=4, max_model_len=128)
    expected = engine.generate(PROMPTS, LIMITS)
    engine.core.sleeping.reload_weights(str(new))
    drop_head(new)
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.2\.eh_proj\.weight"):
        engine.core.sleeping.reload_weights(str(new))
    assert not engine.core.sleeping.is_sleeping()
    assert engine.generate(PROMPTS, LIMITS) == expected
    engine.core.shutdown()
