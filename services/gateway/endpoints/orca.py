"""Puts the mesh's load into a response header for balancers that ask for it (ORCA), with vLLM's names, as the Gateway
API Inference Extension reads it. BIN is xds.data.orca.v3.OrcaLoadReport."""

import base64
import json
import struct

from ..mesh.mesh_view import MeshLoad

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = b"endpoint-load-metrics"
_NAMED_METRICS_TAG = b"\x42"  # field 8, a map's entry: a message of a string (field 1) and a double (field 2)


def response_headers(wanted: bytes, load: MeshLoad) -> list[tuple[bytes, bytes]]:
    """Return the header in the format that the client wants: TEXT, JSON or BIN; none for another format."""
    metrics = {
        "kv_cache_usage_perc": load.kv_usage,
        "num_requests_waiting": float(load.num_waiting),
        "num_requests_running": float(load.num_running),
    }
    match wanted.strip().upper():
        case b"TEXT":
            value = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode()
        case b"JSON":
            value = json.dumps({"named_metrics": metrics}).encode()
        case b"BIN":
            value = base64.b64encode(b"".join(_map_entry(name.encode(), metrics[name]) for name in metrics))
        case _:
            return []
    return [(RESPONSE_HEADER, b"%b %b" % (wanted.strip().upper(), value))]


def _map_entry(name: bytes, value: float) -> bytes:
    entry = b"\x0a" + bytes([len(name)]) + name + b"\x11" + struct.pack("<d", value)
    return _NAMED_METRICS_TAG + bytes([len(entry)]) + entry  # both lengths are below 128: one byte each
