"""Only adapters that are loaded have labels, so that their number is bounded."""

from prometheus_client import CollectorRegistry

from tokenloom.engine_core.data.lora import LoraState
from tokenloom.services.engine.records.engine_metrics import LoraMetrics

FIXED = {"model_name": "m", "engine": "e"}


def state(name: str, num_waiting: int, num_running: int) -> LoraState:
    return LoraState(name, name.encode(), "", 4, False, bool(num_running), num_waiting, num_running)


def test_adapters_are_shown_as_they_are_now() -> None:
    registry, loaded = CollectorRegistry(), [state("a", 2, 1), state("b", 0, 3), state("c", 0, 0)]
    LoraMetrics(registry, FIXED, 4, lambda: loaded, clock=lambda: 12.5)
    for name, waiting, running in (("a", 2, 1), ("b", 0, 3), ("c", 0, 0)):
        labels = FIXED | {"adapter": name}
        assert registry.get_sample_value("tokenloom_lora_requests_waiting", labels) == waiting
        assert registry.get_sample_value("tokenloom_lora_requests_running", labels) == running
    info = {"max_lora": "4", "waiting_lora_adapters": "a", "running_lora_adapters": "a,b"}
    assert registry.get_sample_value("vllm:lora_requests_info", FIXED | info) == 12.5
    loaded.clear()
    assert registry.get_sample_value("tokenloom_lora_requests_running", FIXED | {"adapter": "a"}) is None
    info = {"max_lora": "4", "waiting_lora_adapters": "", "running_lora_adapters": ""}
    assert registry.get_sample_value("vllm:lora_requests_info", FIXED | info) == 12.5
