"""``tokenloom demo`` starts a mesh, asks it one question, shows where the time went, and kills an engine during
the same answer."""

from pathlib import Path
from typing import Annotated

import typer

from tokenloom.model_files.model_path import DEMO_MODEL_NAME, PACKAGED, PICTURE_MODEL_NAME
from tokenloom.process.uncollected_imports import uncollected_imports

PROMPT = "Tell me a story about a dragon."
IMAGE_PROMPT = "What is in the picture?"


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f'Question to ask, by default "{PROMPT}", or "{IMAGE_PROMPT}"', show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    image: Annotated[
        Path | None,
        typer.Option(
            help="Image file that the question shows; tokenloom-picture brings one.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 400,
    speculative_config: Annotated[str, typer.Option(help="How the engines draft tokens, as for serve.")] = "",
    kills: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often to ask again and kill an engine during the answer, each time after it has restarted; by "
            "default once, or never for an image.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the mesh until Ctrl-C, with a page whose button kills an engine.")
    ] = False,
) -> None:
    """Start a whole mesh, chat once through it, kill an engine during the same answer, and stop it."""
    with uncollected_imports():
        from .demo_run import run_demo  # here, because it takes gRPC, which the help does not need

    if image is None and model == PICTURE_MODEL_NAME:
        image = PACKAGED[PICTURE_MODEL_NAME] / "example.png"
    asked = prompt or (PROMPT if image is None else IMAGE_PROMPT)
    num_kills = kills if kills is not None else int(image is None)
    run_demo(asked, image, model, max_tokens, speculative_config, num_kills, keep=keep)
