"""Describes the mesh for the page: its parts, its engines, and which engine sends KV blocks to which."""

from collections.abc import Iterator
from importlib.metadata import version

from tokenloom.v1 import coordinator_pb2

from ..mesh.engine_words import engine_words, placement_values
from ..metrics.kv_flow import KvFlow
from ..serving.served_mesh import ServedMesh

_STATES = {True: "serving", False: "lost"}


def mesh_state(mesh: ServedMesh) -> dict[str, object]:
    """Return the mesh as this gateway sees it now, without addresses."""
    limits, missing = mesh.health.limits(), mesh.health.missing()
    return {
        "version": version("tokenloom"),
        "model": mesh.model,
        "max_model_len": limits.max_model_len if limits else None,
        "max_logprobs": limits.max_logprobs if limits else None,
        "missing": missing,
        "live": mesh.generator.num_live,
        "placement": mesh.view.placement,
        "parts": list(_parts(mesh)),
        "engines": list(_engines(mesh)),
        "kv_links": _links(mesh.metrics.kv_flow),
    }


def _parts(mesh: ServedMesh) -> Iterator[dict[str, object]]:
    """Yield every replica of the parts other than engines. Replicas are numbered as their addresses are sorted."""
    yield _part("gateway", "gateway", "draining" if mesh.health.draining else "serving")
    yield _part("coordinator", "coordinator", _STATES[mesh.view.connected])
    for kind, states in (
        ("tokenizer", [_STATES[is_alive] for is_alive in mesh.tokenizers.replicas()]),
        ("output_processor", mesh.outputs.replicas()),
    ):
        for number, state in enumerate(states):
            yield _part(kind, f"{kind.replace('_', ' ')} {number}", state)


def _part(kind: str, name: str, state: str) -> dict[str, object]:
    return {"kind": kind, "name": name, "state": state}


def _engines(mesh: ServedMesh) -> Iterator[dict[str, object]]:
    """Yield the engines that the coordinator knows, and those that were lost, sorted by name."""
    rule = mesh.view.placement
    known = {entry.identity.engine_id: _engine(entry, rule) for entry in mesh.view.engines}
    for name, seconds in mesh.view.lost_engines().items():
        known[name] = {"name": name, "state": "lost", "lost_seconds": round(seconds, 1)}
    yield from (known[name] for name in sorted(known, key=_natural))


def _engine(entry: coordinator_pb2.EngineEntry, rule: str | None) -> dict[str, object]:
    report = entry.report
    return {
        "name": entry.identity.engine_id,
        **engine_words(entry),
        "running": report.running,
        "waiting": entry.waiting,
        "waiting_tokens": entry.waiting_tokens,
        "seats": report.seats,
        "kv_usage": round(report.kv_usage, 4),
        "num_kv_blocks": entry.identity.num_kv_blocks,
        "placement": placement_values(entry, rule),
    }


def _links(flow: KvFlow) -> list[dict[str, object]]:
    return [
        {
            "source": source,
            "target": target,
            "prompts": link.num_prompts,
            "tokens": link.num_tokens,
            "wait_ms": round(link.wait_ns / 1e6, 1),
        }
        for (source, target), link in flow.links.items()
    ]


def _natural(name: str) -> tuple[str, int, str]:
    """Sort ``engine-10`` after ``engine-9``."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name
