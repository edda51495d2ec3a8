"""What a model records of the experts that its routers choose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.gpu_worker.cuda.late_link import LateLink
from tokenloom.gpu_worker.layers.expert_routes import DeviceCounts, ExpertRoutes
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import routes_of
from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows

SaveCheckpoint = Callable[..., Path]
RunModel = Callable[..., list[torch.Tensor]]
CHOICES = torch.tensor([[3, 1], [1, 0], [1, 3]])


def record(routes: ExpertRoutes, *chosen: torch.Tensor) -> None:
    for layer, choice in zip(routes.layers, chosen, strict=True):
        layer.record(choice, GroupedRows.sort(choice))


def test_choices_are_kept_when_asked_for() -> None:
    routes = ExpertRoutes(num_experts=4, top_k=2, num_layers=2)
    record(routes, CHOICES, CHOICES)  # not between begin and end
    routes.begin(keep_choices=True)
    record(routes, CHOICES, CHOICES.flip(0))
    kept = routes.end()
    assert kept is not None
    assert kept.dtype == np.uint8
    assert kept.tolist() == torch.stack((CHOICES, CHOICES.flip(0)), 1).tolist()
    routes.begin(keep_choices=False)
    record(routes, CHOICES, CHOICES)
    assert routes.end() is None
    assert all(layer.chosen is None for layer in routes.layers)


def test_many_experts_take_two_bytes() -> None:
    routes = ExpertRoutes(num_experts=300, top_k=1, num_layers=1)
    routes.begin(keep_choices=True)
    record(routes, torch.tensor([[299]]))
    kept = routes.end()
    assert kept is not None
    assert (kept.dtype, kept.tolist()) == (np.uint16, [[[299]]])


def test_loads_count_recorded_passes() -> None:
    routes = ExpertRoutes(num_experts=4, top_k=2, num_layers=2)
    totals, balance = routes.loads()
    assert (totals.tolist(), balance.tolist()) == ([0] * 4, [0.0, 0.0])
    routes.begin(keep_choices=False)
    record(routes, CHOICES, torch.tensor([[0, 1], [2, 3], [4, 4]]))  # 4: no expert, as some routers say
    routes.end()
    totals, balance = routes.loads()
    assert totals.tolist() == [2, 4, 1, 3]
    assert balance.tolist() == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_routes_are_those_of_transformers(
    model_type: str, model_impl: str, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    path = save_checkpoint(model_type)
    model = load_model(path, model_impl=model_impl)
    routes = routes_of(model)
    assert routes is not None
    ids = torch.randint(0, 199, (20,), generator=torch.Generator().manual_seed(1))
    routes.begin(keep_choices=True)
    run_model(model, [ids], [[20]])
    found = routes.end()
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    router_logits = reference(ids[None], output_router_logits=True).router_logits
    expected = torch.stack([logits.topk(routes.top_k).indices for logits in router_logits], 1)
    assert found is not None
    assert found.shape == (20, 3, routes.top_k)
    assert found.tolist() == expected.tolist()


def test_a_dense_model_has_no_routes(save_checkpoint: SaveCheckpoint) -> None:
    assert routes_of(load_model(save_checkpoint("llama"))) is None
    assert routes_of(load_model(save_checkpoint("gpt2"))) is None


def test_a_device_s_counts_come_every_32_steps_and_nobody_waits() -> None:
    link, seen = LateLink(), []
    counts = DeviceCounts(num_layers=2, num_experts=3, device=torch.device("cpu"), link=link)
    for step in range(36):
        counts.counts[0, 1, 2] += 1
        seen.append(int(counts.latest()[1, 2]))
        if step in (4, 34):  # the device has done all that it was given
            link.do(len(link.work))
    # The first step orders a copy of 1, and the 33rd one of 33.
    assert seen == [0] * 5 + [1] * 30 + [33]
    assert (link.num_fetches, link.num_waits) == (2, 0)
    assert counts.exact()[1, 2] == 36
