"""Sizes of requests under vLLM's names: outputs that have ended, and prompts whose samples all have."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from tokenloom.services.gateway.metrics.gateway_metrics import RequestSizes


@dataclass
class Ended:
    num_samples: int
    prompts: list[Sequence[int]]
    completion_tokens: list[int]
    finished: dict[int, object] = field(default_factory=dict)

    def max_tokens_of(self, index: int) -> int:
        return 10 * (1 + index // self.num_samples)


def test_each_output_and_each_whole_prompt_is_observed() -> None:
    registry = CollectorRegistry()
    sizes = RequestSizes(registry, {"model_name": "m"})
    sizes.observe(Ended(2, [[1] * 3, [1] * 7], [4, 5, 6, 0], dict.fromkeys((0, 1, 2))))

    def shown(name: str, suffix: str = "sum") -> float | None:
        return registry.get_sample_value(f"vllm:request_{name}_{suffix}", {"model_name": "m"})

    assert (shown("prompt_tokens"), shown("prompt_tokens", "count")) == (3 + 3 + 7, 3)
    assert shown("generation_tokens") == 4 + 5 + 6
    assert shown("params_max_tokens") == 10 + 10 + 20
    assert (shown("max_num_generation_tokens"), shown("max_num_generation_tokens", "count")) == (5, 1)
    assert (shown("params_n"), shown("params_n", "count")) == (2, 1)
