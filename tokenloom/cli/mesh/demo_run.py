"""Starts a mesh, asks it one question, shows where the time went, and asks its adapters a question at once."""

import asyncio
import struct
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh, run_mesh
from tokenloom.supervisor.output import LineCopier, Tail

from ..chat.chat_client import Answer, stream_chat, timeline_table
from ..chat.conversation import Conversation, image_part
from ..failures import INTERRUPTED, reported
from ..model_directory import model_directory
from ..serve.prechecks import check_models
from ..server import Server
from ..tables import plain_console

_ADAPTERS = ("json", "pirate")
"""LoRA adapters of the demo model."""
_ADAPTERS_QUESTION = "What is the capital of France?"
_WIDTH = 32
"""Characters that the longer side of an image takes on the terminal."""


def run_demo(prompt: str, image: Path | None, model: str, max_tokens: int, speculative_config: str) -> None:
    """Print the answer, and exit with the status of the mesh.

    Args:
        image: A file that the question shows; None: it shows none.
        model: Checkpoint directory, GGUF file or hub id.
        max_tokens: The longest answer.
        speculative_config: How the engines draft tokens.
    """
    path, name = model_directory(model, None)
    options = MeshOptions(
        model=path,
        served_model_name=name,
        prefill=1,
        decode=1,
        port=0,
        flags={
            "coordinator": ("--pd-threshold", "0"),  # so that the short question also goes through prefill and decode
            "engine": _engine_flags(path, speculative_config),
        },
        drain_timeout=5.0,
    )
    with reported():
        check_models([path], options)
    console = plain_console(soft_wrap=True)
    logs = Tail()
    started = time.monotonic()

    async def talk(mesh: Mesh) -> None:
        parts = ", ".join(part.spec.name for part in mesh.parts)
        console.print(f"starting {parts} …", style="dim")
        await mesh.wait_serving()
        http = mesh.gateways[0].http
        assert http is not None
        console.print(f"ready after {time.monotonic() - started:.1f} s at http://{http}", style="dim")
        for each in mesh.fall_backs("engine"):
            console.print(f"fall-back of engines: {each}", style="yellow", markup=False)
        console.print()
        if image is not None:
            console.print(picture_text(image) if console.color_system else f"{image}\n")
        console.print(_spoken("you", f"{prompt}\n"), _spoken(name, ""), sep="", end="")
        server = Server(f"http://{http}")
        answer = await asyncio.to_thread(stream_chat, server, _body(name, prompt, max_tokens, image), _print_piece)
        _print_answer_end(console, answer)
        if path == DEMO_MODEL:
            await _ask_adapters(console, server, name)

    try:
        with reported():
            outcome = run_mesh(options, LineCopier(logs), talk)
    except typer.Exit:
        typer.echo(logs.text(), err=True)
        raise
    last = Text("all parts have stopped", "dim") if outcome.clean else Text("a part had to be killed", "red")
    console.print(last)
    raise typer.Exit(INTERRUPTED if outcome.interrupted else not outcome.clean)


def _engine_flags(path: Path, speculative_config: str) -> tuple[str, ...]:
    flags = ("--speculative-config", speculative_config) if speculative_config else ()
    if path != DEMO_MODEL:
        return flags
    modules = ",".join(f"{name}={DEMO_ADAPTERS / name}" for name in _ADAPTERS)
    return (*flags, "--enable-lora", "--lora-modules", modules)


def picture_text(file: Path) -> Text:
    """Return an image as a terminal shows it: in each character two of its pixels, one above the other."""
    from PIL import Image  # with the encoder's packages, without which no model here reads images

    with Image.open(file) as opened:
        small = opened.convert("RGB")
    small.thumbnail((_WIDTH, _WIDTH))
    colours = [f"#{pixel.hex()}" for (pixel,) in struct.iter_unpack("3s", small.tobytes())]
    text = Text()
    for start in range(0, len(colours) - small.width, 2 * small.width):
        for upper in range(start, start + small.width):
            text.append("▀", f"{colours[upper]} on {colours[upper + small.width]}")
        text.append("\n")
    return text


def _body(model: str, prompt: str, max_tokens: int, image: Path | None = None) -> dict[str, Any]:
    conversation = Conversation()
    conversation.ask(prompt, [image_part(image)] if image else [])
    return {
        "model": model,
        "messages": conversation.messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_timeline": True,
    }


async def _ask_adapters(console: Console, server: Server, model: str) -> None:
    """Ask the model and its adapters the same question at once: the engine answers them in one batch."""
    names = (model, *(f"{model}:{adapter}" for adapter in _ADAPTERS))
    texts: dict[str, list[str]] = {name: [] for name in names}
    asking = (
        asyncio.to_thread(stream_chat, server, _body(name, _ADAPTERS_QUESTION, 60), texts[name].append)
        for name in names
    )
    await asyncio.gather(*asking)
    asked = Text("(asked the model and two LoRA adapters at once)", "dim")
    console.print("\n", _spoken("you", f"{_ADAPTERS_QUESTION} "), asked, sep="")
    for name, pieces in texts.items():
        console.print(_spoken(name, "".join(pieces)))


def _spoken(name: str, text: str) -> Text:
    return Text.assemble((name, "bold"), f"  {text}")


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _print_answer_end(console: Console, answer: Answer) -> None:
    console.print("\n")
    console.print(timeline_table(answer))
