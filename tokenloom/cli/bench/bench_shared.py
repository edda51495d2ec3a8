"""``tokenloom bench shared`` measures an engine next to busy programs and under a CPU limit."""

from typing import Annotated, Any

import typer

from tokenloom.bench.shared_machine.run import SharedOptions, run_shared, table
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..options import engine_options, offers, parsed
from .bench_load import AsJson, OutputJson
from .bench_output import failures, show


@offers(engine_options("dtype", "quantization", "num_threads"))
def shared(
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    requests: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once. [default: 1, 32]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 64,
    hogs: Annotated[int, typer.Option(min=0, help="Busy loops next to the engine; 0: do not measure this.")] = 2,
    quota: Annotated[float, typer.Option(min=0, help="Cores of a CPU limit; 0: do not measure this.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Shortest time of a measurement.")] = 4.0,
    turns: Annotated[int, typer.Option(min=1, help="Measurements of each case, in turns.")] = 3,
    output_json: OutputJson = None,
    as_json: AsJson = False,
    **engine: Any,
) -> None:
    """Measure which share of its tokens/s an engine keeps next to busy loops, and under the CPU limit of a control
    group, which this machine must let the command make."""
    sizes = tuple(requests or (1, 32))
    with failures():
        report = run_shared(SharedOptions(model, sizes, tokens, hogs, quota, seconds, turns, parsed(engine)))
    show(report, [table(report)], as_json=as_json, path=output_json)
