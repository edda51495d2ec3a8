"""``tokenloom plan`` says how many engines of each role a running mesh needs, and changes roles if it is asked to;
``tokenloom scale`` changes how many engines a mesh has, or ranks a data-parallel group, and loses no request;
``tokenloom move`` lets running requests go on at another engine.

A plan starts and stops no engine: the replicas that it wants are printed, and exported for KEDA or an autoscaler.
"""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Annotated

import typer

from ..failures import CommandFailed, reported
from ..server import ApiKey, BaseUrl

_ANSWER = re.compile("[0-9a-f]{40}")
_NO_ROUTE = "see /docs for the available endpoints"
"""What a gateway says of a path that it does not serve: without admin keys it serves no admin route."""


def plan(
    ttft: Annotated[float, typer.Option(min=0.01, help="Goal: seconds to the first token.")] = 2.0,
    itl: Annotated[float, typer.Option(min=0.001, help="Goal: seconds between two tokens.")] = 0.05,
    most: Annotated[int, typer.Option(min=1, help="Engines of one model at most.")] = 64,
    every: Annotated[
        float | None, typer.Option(min=1, help="Plan again after so many seconds, until Ctrl-C; else once.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply/--dry-run", help="Change the roles of engines, or only print the plan.")
    ] = False,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT for gauges of the wanted replicas, which KEDA or an autoscaler reads.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator; otherwise that of the newest local mesh.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The local mesh on this HTTP port.")] = None,
    certs: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, and .crt and .key of planner or operator.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each plan.")] = False,
) -> None:
    """Plan the engines of a mesh for goals of latency.

    With --apply, engines change their roles. No engine is started or stopped: the plan names the replicas that are
    wanted, and --metrics exports them to what scales the engines. Fewer are wanted only after 5 minutes of watching.
    """
    # Here, because they take gRPC, which the help does not need.
    from tokenloom.planner.demand import Goals
    from tokenloom.planner.planner import Limits

    from .coordinator import coordinator_of
    from .plan_run import PlanOutput, run

    with reported(), contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        address = coordinator or coordinator_of(port)
        goals, limits = Goals(ttft_seconds=ttft, itl_seconds=itl), Limits(most=most)
        asyncio.run(run(address, certs, goals, limits, every=every, apply=apply, output=PlanOutput(as_json, metrics)))


def scale(
    group: Annotated[
        str,
        typer.Argument(
            metavar="[GROUP]",
            help="The data-parallel group; `serve --data-parallel-size` calls its own data-parallel. Left out: the "
            "engines of a mesh without one.",
        ),
    ],
    size: Annotated[
        int | None,
        typer.Argument(metavar="SIZE", min=1, help="Ranks that the group, or engines that the mesh, should have."),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds to wait for ranks that have not joined yet; 300 where this command starts them."
        ),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator; otherwise that of the newest local mesh.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The local mesh on this HTTP port.")] = None,
    certs: Annotated[Path | None, typer.Option(help="Folder with ca.crt, operator.crt and operator.key.")] = None,
) -> None:
    """Change how many engines a running mesh has, or ranks a data-parallel group, under load. No request is lost.

    In a mesh of `tokenloom serve` on this machine, engines are started and stopped. With --coordinator, start the new
    ranks first: engines with the options of the others, --data-parallel-size SIZE and their --data-parallel-rank.
    After the group has shrunk, the ranks beyond SIZE have no requests and may be stopped.
    """
    # Here, because they take gRPC, which the help does not need.
    from .coordinator import Target, scale_engines, scale_group

    if size is None and not group.isdecimal():
        raise typer.BadParameter("name the number of engines, or a group and its size", param_hint="SIZE")
    with reported():
        target = Target(coordinator, port, certs)
        if size is None:
            typer.echo(scale_engines(target, int(group)))
        else:
            typer.echo(scale_group(target, group, size, wait))


def move(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The id of an answer, or an engine: all requests that it runs.")
    ],
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Where they go on. Left out: the coordinator picks for each.")
    ] = "",
    base_url: BaseUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Let running requests go on at another engine, with their KV. Their clients notice nothing.

    The key is the administrator's. The engines need --kv-transports. What waits to run, or ends within a few tokens,
    stays where it is; the exit status is 1 if anything does.
    """
    from urllib.parse import urlencode

    from ..server import connect, reason

    with reported():
        named = "request_id" if _ANSWER.search(request) else "source"
        query = {named: request} | ({"target": engine} if engine else {})
        answer = connect(base_url, api_key).post(f"/move_requests?{urlencode(query)}", {})
        if answer.status == 404 and _NO_ROUTE in reason(answer.body):
            raise CommandFailed("the server has no admin routes: start it with --admin-api-key, and give that key")
        found = answer.value()
    typer.echo(", ".join(f"{what}: {found[what]}" for what in ("moved", "ended", "stayed")))
    for why in found["reasons"]:
        typer.echo(f"stayed: {why}", err=True)
    if found["stayed"]:
        raise typer.Exit(1)
