"""``tokenloom bench`` holds a command for each benchmark."""

import typer

from .bench_disaggregated import disaggregated
from .bench_kv import kv
from .bench_mesh import mesh
from .bench_offline import step, throughput
from .bench_overload import overload
from .bench_peers import model, peers
from .bench_serve import serve
from .bench_shared import shared
from .bench_speculation import speculation

bench = typer.Typer(help="Measure the engine and the mesh on this machine.", no_args_is_help=True, add_completion=False)
for command in (serve, throughput, mesh, overload, step, shared, speculation, kv, disaggregated, peers, model):
    bench.command()(command)
