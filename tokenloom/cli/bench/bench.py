"""``tokenloom bench`` holds a command for each benchmark."""

import typer

from ..commands import lazy_group

_COMMANDS = {
    "Commands": (
        "bench_serve:serve",
        "bench_offline:throughput",
        "bench_mesh:mesh",
        "bench_mesh:overload",
        "bench_mesh:scale",
        "bench_mesh:agents",
        "bench_offline:step",
        "bench_offline:shared",
        "bench_offline:speculation",
        "bench_offline:kv",
        "bench_disaggregated:disaggregated",
        "bench_peers:peers",
        "bench_peers:regress",
        "bench_peers:model",
    )
}

bench = typer.Typer(
    cls=lazy_group(__package__, _COMMANDS),
    help="Measure the engine and the mesh on this machine.",
    no_args_is_help=True,
    add_completion=False,
)


@bench.callback()
def _options() -> None:
    """Handle options that stand before a command: none."""
