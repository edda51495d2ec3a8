"""The experts of gpt-oss in bfloat16, from 4 bits and from plain tensors, against transformers' in float32."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.gpu_worker.layers.test_quantized_linear import needs_kernel
from tests.gpu_worker.models.gpt_oss import EXPERTS, HIDDEN, write_gpt_oss
from tokenloom.gpu_worker.layers.expert_routes import ExpertRoutes
from tokenloom.gpu_worker.layers.quantized_experts import QuantizedExperts
from tokenloom.gpu_worker.models.decoder import DecoderModel, expert_layers
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import routes_of

LAYER, TOP_K = 1, 3


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


def loaded(path: Path, dtype: str = "bfloat16") -> DecoderModel:
    model = load_model(path, dtype)
    assert isinstance(model, DecoderModel)
    return model


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@torch.inference_mode()
def expected(path: Path, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what transformers' layer computes of x, and the experts that its router chooses."""
    unpacks = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=unpacks)
    mlp = model.model.layers[LAYER].mlp
    return mlp(x.float()[None])[0][0], mlp.router(x.float())[2]


@needs_kernel
@torch.inference_mode()
def test_inputs_of_8_bits_cost_less_than_a_hundredth(published: Path, tmp_path: Path) -> None:
    x = rows(200)
    right, chosen = expected(published, x)
    errors = []
    for path in (published, write_gpt_oss(tmp_path, mxfp4=False)):
        experts = expert_layers(loaded(path))[LAYER]
        assert (type(experts._grouped) is QuantizedExperts) == (path == published)
        found = experts(x).float()
        # Rounding may send a row to other experts, where the scores of two are nearly equal.
        same = (experts._route(x)[1].sort(-1)[0] == chosen.sort(-1)[0]).all(-1)
        assert same.float().mean() > 0.9
        errors.append(float((found - right)[same].norm() / right[same].norm()))
    assert errors[0] < 0.01  # bfloat16 itself: 0.004
    assert errors[1] < 0.006


@needs_kernel
@torch.inference_mode()
def test_choices_are_recorded(published: Path) -> None:
    model = loaded(published)
    routes = routes_of(model)
    assert isinstance(routes, ExpertRoutes)
    experts = expert_layers(model)[LAYER]
    routes.begin(keep_choices=False)
    experts(rows(10))
    routes.end()
    assert routes.counts()[LAYER].sum() == 10 * TOP_K
    assert routes.counts().shape == (len(routes.layers), EXPERTS)
