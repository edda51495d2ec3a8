"""``tokenloom demo`` starts a mesh, asks it one question, and shows where the time went."""

from typing import Annotated

import typer

from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.process.uncollected_imports import uncollected_imports

PROMPT = "Tell me a story about a dragon."


def demo(
    prompt: Annotated[str, typer.Argument(help="Question to ask.")] = PROMPT,
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 400,
    speculative_config: Annotated[str, typer.Option(help="How the engines draft tokens, as for serve.")] = "",
) -> None:
    """Start a whole mesh, chat once through it, show where the time went, and stop it."""
    with uncollected_imports():
        from .demo_run import run_demo  # here, because it takes gRPC, which the help does not need

    run_demo(prompt, model, max_tokens, speculative_config)
