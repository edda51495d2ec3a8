"""``tokenloom completion`` prints a shell's completion script."""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # what --show-completion prints

_COMMAND = "tokenloom"


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Shell that will read the script.")]) -> None:
    """Print a script that completes commands and options: eval "$(tokenloom completion bash)"."""
    print(get_completion_script(prog_name=_COMMAND, complete_var="_TOKENLOOM_COMPLETE", shell=shell.value))
