"""Starts a mesh, asks it one question, and shows where the time went."""

import asyncio
import time

import typer
from rich.console import Console
from rich.markup import escape

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier, Tail
from tokenloom.supervisor.run import run_mesh

from ..chat.chat_client import Answer, stream_chat
from ..chat.timeline_table import timeline_table
from ..failures import INTERRUPTED, reported
from ..server import Server
from .model_directory import model_directory
from .prechecks import check_model


def run_demo(prompt: str, model: str, max_tokens: int, speculative_config: str) -> None:
    """Print the answer, and exit with the status of the mesh.

    Args:
        model: Checkpoint directory, GGUF file or hub id.
        max_tokens: The longest answer.
        speculative_config: How the engines draft tokens.
    """
    path, name = model_directory(model, None)
    with reported():
        check_model(path, {})
    options = MeshOptions(
        model=path,
        served_model_name=name,
        prefill=1,
        decode=1,
        port=0,
        flags={
            "coordinator": ("--pd-threshold", "0"),  # so that the short question also goes through prefill and decode
            "engine": ("--speculative-config", speculative_config) if speculative_config else (),
        },
        drain_timeout=5.0,
    )
    body = {
        "model": name,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_timeline": True,
    }
    console = Console(highlight=False, soft_wrap=True)
    logs = Tail()
    started = time.monotonic()

    async def talk(mesh: Mesh) -> None:
        parts = ", ".join(part.spec.name for part in mesh.parts)
        console.print(f"[dim]starting {parts} …[/]")
        await mesh.wait_serving()
        http = mesh.gateways[0].http
        assert http is not None
        console.print(f"[dim]ready after {time.monotonic() - started:.1f} s at http://{http}[/]\n")
        console.print(f"[bold]you[/]  {escape(prompt)}\n[bold]{escape(name)}[/]  ", end="")
        answer = await asyncio.to_thread(stream_chat, Server(f"http://{http}"), body, _print_piece)
        _print_answer_end(console, answer)

    try:
        with reported():
            outcome = run_mesh(options, LineCopier(logs), talk)
    except typer.Exit:
        typer.echo(logs.text(), err=True)
        raise
    console.print("[dim]all parts have stopped[/]" if outcome.clean else "[red]a part had to be killed[/]")
    raise typer.Exit(INTERRUPTED if outcome.interrupted else not outcome.clean)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _print_answer_end(console: Console, answer: Answer) -> None:
    console.print("\n")
    console.print(timeline_table(answer))
