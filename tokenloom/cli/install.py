"""What an installation has besides the package: ``tokenloom build-kernels`` builds the CPU kernels ahead, for wheels
and images, and ``tokenloom completion`` prints a shell's completion script."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .failures import CommandFailed, reported


def build_kernels(
    levels: Annotated[
        list[str] | None,
        typer.Option(
            help="Levels of processors, separated by commas, or all that a compiler here can build. May be repeated. "
            "[default: all]"
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the libraries; by default inside the package.")
    ] = None,
) -> None:
    """Build the C++ kernels ahead, so that neither a compiler nor time is needed at the first start."""
    from tokenloom.gpu_worker.kernels.build_ahead import build_ahead, compiler_for
    from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
    from tokenloom.gpu_worker.kernels.levels import LEVELS
    from tokenloom.gpu_worker.kernels.prebuilt import FOLDER

    known = {level.name: level for level in LEVELS}
    wanted = [name.strip() for each in levels or ["all"] for name in each.split(",")]
    if wanted == ["all"]:
        wanted = [name for name in known if compiler_for(known[name])]
    if unknown := [name for name in wanted if name not in known]:
        raise typer.BadParameter(f"{unknown[0]} is not among {', '.join(known)}", param_hint="--levels")
    with reported():
        if not wanted:
            raise CommandFailed("there is no C++ compiler: install g++ (aarch64: also g++-aarch64-linux-gnu)")
        for name in wanted:
            compiler = compiler_for(known[name])
            if compiler is None:
                raise CommandFailed(f"{name}: no compiler for {known[name].machine}: install g++-{name}-linux-gnu")
            started = time.monotonic()
            try:
                libraries = build_ahead(known[name], compiler, folder or FOLDER)
            except KernelsUnavailable as error:
                raise CommandFailed(f"{name}: {error}") from None
            size = sum(library.stat().st_size for library in libraries)
            seconds = time.monotonic() - started
            print(f"{name}: {len(libraries)} libraries, {size / 1e6:.1f} MB, {seconds:.0f} s in {libraries[0].parent}")


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Shell that will read the script.")]) -> None:
    """Print a script that completes commands and options: eval "$(tokenloom completion bash)"."""
    # What --show-completion prints; imported here, because it takes time at the start of the other command.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="tokenloom", complete_var="_TOKENLOOM_COMPLETE", shell=shell.value))
