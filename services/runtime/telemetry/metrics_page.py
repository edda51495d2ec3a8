"""Chooses the format of /metrics by what the client accepts."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

OPENMETRICS = "application/openmetrics-text"
_AS_IS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"


def accepted(accept: str) -> str:
    """Return the ``Accept`` header to give to prometheus_client for a client's.

    Without ``escaping``, prometheus_client writes ``vllm_x`` for ``vllm:x`` in OpenMetrics, although colons are valid
    there: the names would depend on the scraper, and no dashboard would find them.
    """
    kinds = (item.partition(";")[0].strip().lower() for item in accept.split(","))
    return _AS_IS if OPENMETRICS in kinds else ""


def metrics_page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics, which has exemplars, for a client that accepts it, and
    otherwise Prometheus's text."""
    encode: Callable[[CollectorRegistry], bytes]
    encode, content_type = choose_encoder(accepted(accept))
    return encode(registry), content_type
