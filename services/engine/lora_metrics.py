"""Shows which LoRA adapters are in use, under vLLM's name and by adapter."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from tokenloom.engine_core.data.lora import LoraState
from tokenloom.services.runtime.telemetry.process_metrics import VLLM

_RUNNING, _WAITING = "tokenloom_lora_requests_running", "tokenloom_lora_requests_waiting"


class LoraMetrics:
    """Reads the adapters when metrics are scraped, so steps pay nothing for them. Only loaded adapters have labels, so
    their number is bounded."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        max_loras: int,
        read: Callable[[], Sequence[LoraState]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the adapters that are loaded. ``clock``: Unix time."""
        self._labels = dict(labels)
        self._max_loras = max_loras
        self._read = read
        self._clock = clock
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        text = "Unix time of this page, labelled with the LoRA adapters that have requests."
        info = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        names = list(self._labels)
        return [
            GaugeMetricFamily(f"{VLLM}lora_requests_info", text, labels=[*names, *info]),
            GaugeMetricFamily(_RUNNING, "Requests with a LoRA adapter that are running.", labels=[*names, "adapter"]),
            GaugeMetricFamily(_WAITING, "Requests with a LoRA adapter that wait to run.", labels=[*names, "adapter"]),
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the values now."""
        adapters, values = self._read(), list(self._labels.values())
        info, running, waiting = self.describe()
        waiting_names = ",".join(each.name for each in adapters if each.num_waiting)
        running_names = ",".join(each.name for each in adapters if each.num_running)
        info.add_metric([*values, str(self._max_loras), waiting_names, running_names], self._clock())
        for each in adapters:
            running.add_metric([*values, each.name], each.num_running)
            waiting.add_metric([*values, each.name], each.num_waiting)
        return [info, running, waiting]
