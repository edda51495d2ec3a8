"""``tokenloom bench peers`` compares engines, ``bench regress`` two checkouts of Tokenloom; ``bench model`` writes
checkpoints to compare on."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.bench.peers.compare import ADAPTERS, PeerOptions, num_runs, run_peers, tables, write_plot
from tokenloom.bench.peers.workloads import DEFAULT_WORKLOADS, LORA_RANK, WORKLOADS, adapter_paths
from tokenloom.bench.regress import CASES, RegressOptions, named, run_regress, table
from tokenloom.bench.report.paired import FEWEST, Verdict

from .bench_output import AsJson, OutputJson, failures, progress, show

_HERE = Path(__file__).resolve().parents[3]


def peers(
    model: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, help="Checkpoint; MODEL-ov and MODEL-<type>.gguf must be next to it."
        ),
    ],
    python: Annotated[
        list[str] | None,
        typer.Option(help="ENGINE=INTERPRETER, such as vllm=/opt/vllm/bin/python; tokenloom uses this interpreter."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Folder of environments named after engines; every ROOT/ENGINE/bin/python is used."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(WORKLOADS)} [default: all but first-token, of 2,048 tokens, and lora, which needs "
            "MODEL-lora]."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds, in each of which every engine runs once.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads of each engine; 0: all cores.")] = 0,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="ENGINE.NAME=VALUE for an adapter: openvino.kv=bf16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    output_json: OutputJson = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart of output tokens/s to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare engines on one stream, a prompt of 512 tokens, a batch of 32, and 32 prompts that share 512 tokens."""
    with failures():
        options = PeerOptions(
            model=model.resolve(),
            pythons=_pythons(python or [], root),
            workloads=tuple(workload or DEFAULT_WORKLOADS),
            repeats=repeats,
            threads=threads,
            options=_options(option or []),
            seed=seed,
        )
        if unknown := set(options.workloads) - set(WORKLOADS):
            raise ValueError(f"workload {', '.join(sorted(unknown))} is unknown; expected {', '.join(WORKLOADS)}")
        with progress() as shown:
            task = shown.add_task(f"loading {', '.join(options.pythons)}", total=num_runs(options) + 1)
            report = run_peers(
                options, lambda name, engine: shown.update(task, advance=1, description=f"{name}: {engine}")
            )
        if plot is not None:
            write_plot(plot, report)
    show(report, tables(report), as_json=as_json, path=output_json)


def model(
    shape: Annotated[
        str,
        typer.Argument(
            help="tiny-fp32, tiny-bf16, tiny-qwen3.5, qwen3-0.6b, llama-8b, qwen3.5-0.8b or qwen3.5-4b-part."
        ),
    ],
    directory: Annotated[Path, typer.Argument(file_okay=False, help="Where to write the checkpoint.")],
    adapters: Annotated[int, typer.Option(min=0, help="LoRA adapters to write to DIRECTORY-lora.")] = 0,
) -> None:
    """Write a checkpoint of a real shape with random weights, and adapters of it for the workload lora."""
    from tokenloom.bench.random_adapter import write_adapter  # imported here because they import torch
    from tokenloom.bench.random_model import write_model

    with failures():
        write_model(shape, directory)
        for seed, path in enumerate(adapter_paths(str(directory), adapters)):
            write_adapter(Path(path), directory, LORA_RANK, seed)


def _pythons(given: list[str], root: Path | None) -> dict[str, str]:
    """Return the interpreter of tokenloom, and those of the other engines that were named or found."""
    found = {"tokenloom": sys.executable}
    for engine in ADAPTERS if root is not None else ():
        assert root is not None
        if (candidate := root / engine / "bin" / "python").exists():
            found[engine] = str(candidate)
    for text in given:
        engine, separator, interpreter = text.partition("=")
        if engine not in ADAPTERS or not separator:
            raise ValueError(f"python: {text!r} must be ENGINE=INTERPRETER with one of {', '.join(ADAPTERS)}")
        found[engine] = interpreter
    return found


def _options(texts: list[str]) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        engine, _, name = key.partition(".")
        if engine not in ADAPTERS or not name or not separator:
            raise ValueError(f"set: {text!r} must be ENGINE.NAME=VALUE with one of {', '.join(ADAPTERS)}")
        options.setdefault(engine, {})[name] = value
    return options


def regress(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint directory.")],
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout to compare with.")],
    ours: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout under test.")] = _HERE,
    case: Annotated[list[str] | None, typer.Option(help=f"[default: {', '.join(CASES)}]")] = None,
    rounds: Annotated[int, typer.Option(min=FEWEST, help="Rounds of a case, at least.")] = FEWEST,
    most_rounds: Annotated[int, typer.Option(min=FEWEST, help="Rounds of a case that is not decided earlier.")] = 20,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads of the offline cases; 0: all cores.")] = 0,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent requests to the servers.")] = 32,
    limit: Annotated[float, typer.Option(min=0, help="Fail if a figure is worse by more than this share.")] = 0.03,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkouts in turns: one stream, a prompt, a batch, a shared prefix, and a server with 32 streams."""
    with failures():
        trees = (base.resolve(), ours.resolve())
        options = RegressOptions(
            model.resolve(), *trees, tuple(case or CASES), rounds, max(rounds, most_rounds), limit, threads, streams
        )
        if unknown := set(options.cases) - set(CASES):
            raise ValueError(f"case {', '.join(sorted(unknown))} is unknown; expected {', '.join(CASES)}")
        with progress() as shown:
            task = shown.add_task("starting both trees")
            report = run_regress(
                options, lambda name, tree: shown.update(task, advance=1, description=f"{name}: {tree}")
            )
    show(report, [table(report)], as_json=as_json, path=output_json)
    if undecided := named(report, Verdict.UNDECIDED):
        typer.secho(
            f"Undecided, because the noise is larger than the limit: {', '.join(undecided)}.", fg="yellow", err=True
        )
    if slower := named(report, Verdict.SLOWER):
        typer.secho(f"Slower than {base} by more than {limit:.0%}: {', '.join(slower)}.", fg="red", err=True)
        raise typer.Exit(1)
