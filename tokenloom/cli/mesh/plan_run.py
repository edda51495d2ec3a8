"""Prints the plans of a mesh, carries them out and exports them."""

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import grpc.aio
import typer
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from tokenloom.planner.controller import Controller
from tokenloom.planner.demand import Goals
from tokenloom.planner.planner import Limits, Plan
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime import addresses
from tokenloom.services.runtime.peers.callers import OPERATOR, PLANNER
from tokenloom.services.runtime.peers.channels import Channels

from ..failures import CommandFailed
from .coordinator import tls_of

REPLICAS = "tokenloom_planned_replicas"
"""Name of the gauge."""
_FIRST_SECONDS = 2.0
"""Between the two looks of a single plan: how fast queues grow is seen from one look to the next."""


class PlanOutput:
    """Prints plans, and shows them as gauges if there is an address for them."""

    def __init__(self, as_json: bool, metrics: str | None) -> None:
        """``metrics``: host and port. Raises ``CommandFailed`` for another form, or if the port is taken."""
        self._as_json = as_json
        self._replicas: Gauge | None = None
        if metrics is None:
            return
        registry = CollectorRegistry()
        self._replicas = Gauge(
            REPLICAS,
            "Replicas that a set of engines should have. The planner does not set them.",
            ("model_name", "set"),
            registry=registry,
        )
        try:
            address = addresses.parse(metrics)
            start_http_server(address.port, address.host, registry)
        except (OSError, InvalidArgument) as error:
            raise CommandFailed(f"--metrics {metrics}: {error}") from None

    def show(self, plans: Mapping[str, Plan]) -> None:
        """Print the plans by model."""
        for model, plan in plans.items():
            typer.echo(json.dumps(_object(model, plan)) if self._as_json else _text(model, plan))
            if self._replicas is not None:
                for name, count in plan.replicas.items():
                    self._replicas.labels(model, name).set(count)


async def run(
    coordinator: str,
    certs: Path | None,
    goals: Goals,
    limits: Limits,
    *,
    every: float | None,
    apply: bool,
    output: PlanOutput,
) -> None:
    """Plan once, or every so many seconds until cancelled or until SIGTERM, which cancels the caller. While it repeats,
    a coordinator that is away is waited for.

    Raises ``CommandFailed`` if a single plan cannot be made, or no engine serves.
    """
    if (task := asyncio.current_task()) is not None:
        # As the first process of a container it would otherwise ignore SIGTERM.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    controller = Controller(Channels(tls_of(certs, PLANNER, OPERATOR)), coordinator, goals, limits)
    await _look(controller, must=every is None)
    while True:
        await asyncio.sleep(every or _FIRST_SECONDS)
        plans = await _look(controller, must=every is None)
        output.show(plans)
        if apply:
            for failure in await controller.apply([flip for plan in plans.values() for flip in plan.flips]):
                typer.secho(failure, fg="red", err=True)
        if every is None:
            return


async def _look(controller: Controller, *, must: bool) -> dict[str, Plan]:
    try:
        plans = await controller.plan()
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        cause = error.details() if isinstance(error, grpc.aio.AioRpcError) else "it did not answer in time"
        message = f"the coordinator cannot be asked: {cause}"
        if must:
            raise CommandFailed(message) from None
        typer.secho(message, fg="red", err=True)
        return {}
    if must and not plans:
        raise CommandFailed("no engine is serving, so there is nothing to plan")
    return plans


def _text(model: str, plan: Plan) -> str:
    roles = ", ".join(f"{count} {role} (of {plan.wanted[role]} wanted)" for role, count in plan.engines.items())
    demand = f"demand {plan.demand.prefill:.2f} prefill, {plan.demand.decode:.2f} decode"
    lines = [f"{model}: {roles}; {demand}"]
    lines += [f"  {flip.engine} becomes {flip.role}" for flip in plan.flips]
    lines += [f"  {name}: {count} replicas" for name, count in plan.replicas.items()]
    return "\n".join(lines)


def _object(model: str, plan: Plan) -> dict[str, object]:
    return {
        "model": model,
        "engines": plan.engines,
        "wanted": plan.wanted,
        "demand": {"prefill": round(plan.demand.prefill, 3), "decode": round(plan.demand.decode, 3)},
        "flips": [{"engine": flip.engine, "role": flip.role} for flip in plan.flips],
        "replicas": plan.replicas,
    }
