"""Starts a mesh, asks it one question, shows where the time went, asks its adapters a question at once, and kills an
engine during an answer."""

import asyncio
import os
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh, run_mesh
from tokenloom.supervisor.output import LineCopier, Tail
from tokenloom.supervisor.part import SupervisedPart

from ..chat.chat_client import Answer, stream_chat, timeline_table
from ..chat.conversation import Conversation, image_part
from ..failures import INTERRUPTED, CommandFailed, RequestFailed, reported
from ..model_directory import model_directory
from ..serve.prechecks import check_models
from ..server import Server
from ..tables import plain_console

_ADAPTERS = ("json", "pirate")
"""LoRA adapters of the demo model."""
_ADAPTERS_QUESTION = "What is the capital of France?"
_KILLED_AT = 5
"""The engine is killed after the fifth part of the answer."""
_ATTEMPTS = 4
"""How often the question is asked for one kill, as long as the whole answer was computed before the engine ended."""
_WIDTH = 32
"""Characters that the longer side of an image takes on the terminal."""


def run_demo(
    prompt: str, image: Path | None, model: str, max_tokens: int, speculative_config: str, num_kills: int, *, keep: bool
) -> None:
    """Print the answers, and exit with the status of the mesh.

    Args:
        image: A file that the question shows; None: it shows none.
        model: Checkpoint directory, GGUF file or hub id.
        max_tokens: The longest answer.
        speculative_config: How the engines draft tokens.
        num_kills: How often an engine is killed during the answer.
        keep: Whether the mesh stays until Ctrl-C, with a page that kills engines.
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
        page_kills=keep,
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
        body = _body(name, prompt, max_tokens, image)
        answer = await asyncio.to_thread(stream_chat, server, body, _print_piece)
        _print_answer_end(console, answer)
        if path == DEMO_MODEL:
            await _ask_adapters(console, server, name)
        if num_kills:
            await _Kills(console, mesh, server, body, prompt, answer.text).run(num_kills)
        if keep:
            console.print(f"\nthe page at http://{http}/ has a button that kills an engine; Ctrl-C stops the mesh")
            await mesh.wait_failed()

    try:
        with reported():
            outcome = run_mesh(options, LineCopier(logs), talk)
    except typer.Exit:
        typer.echo(logs.text(), err=True)
        raise
    last = Text("all parts have stopped", "dim") if outcome.clean else Text("a part had to be killed", "red")
    console.print(last)
    raise typer.Exit(INTERRUPTED if outcome.interrupted and not keep else not outcome.clean)


def _engine_flags(path: Path, speculative_config: str) -> tuple[str, ...]:
    flags: tuple[str, ...] = ("--disable-log-stats",)  # an answer to one person: the terminal is theirs
    if speculative_config:
        flags = (*flags, "--speculative-config", speculative_config)
    if path != DEMO_MODEL:
        return flags
    modules = ",".join(f"{name}={DEMO_ADAPTERS / name}" for name in _ADAPTERS)
    # In float32 another engine goes on with the same tokens. In bfloat16 a text that is computed as a prompt may be
    # rounded differently from one that is computed token by token.
    return (*flags, "--enable-lora", "--lora-modules", modules, "--dtype", "float32")


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


@dataclass
class InterruptedAnswer:
    """Takes the pieces of an answer, and calls ``interrupt`` once, when so much of it has arrived.

    Attributes:
        after: Characters that arrive before.
        write: Receives the pieces; None: they are not shown.
        killed_after: Characters that had arrived then; None: too few have.
        pause: The longest time between two pieces since then, in seconds; None: none has come since then.
    """

    after: int
    interrupt: Callable[[], None]
    write: Callable[[str], None] | None = None
    clock: Callable[[], float] = time.monotonic
    killed_after: int | None = None
    pause: float | None = None
    _num_characters: int = 0
    _last: float = 0.0

    def __call__(self, text: str) -> None:
        now = self.clock()
        if self.killed_after is not None:
            self.pause = max(self.pause or 0.0, now - self._last)
        self._last = now
        self._num_characters += len(text)
        if self.write is not None:
            self.write(text)
        if self.killed_after is None and self._num_characters >= self.after:
            self.killed_after = self._num_characters
            self.interrupt()


@dataclass
class _Kills:
    """Asks a question again and again, and kills the engine that decodes during each answer.

    Attributes:
        text: The answer of a mesh that loses no engine.
        pauses: Seconds, of each answer with which another engine went on.
        failures: Why answers broke.
    """

    console: Console
    mesh: Mesh
    server: Server
    body: Mapping[str, Any]
    question: str
    text: str
    pauses: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_different: int = 0

    async def run(self, count: int) -> None:
        """Kill so many times, each after the restart of the last engine, and print each. Raises ``CommandFailed`` if an
        answer broke."""
        asked = Text("(once more; the engine that decodes is killed during the answer)", "dim")
        self.console.print("\n", _spoken("you", f"{self.question} "), asked, sep="")
        for number in range(1, count + 1):
            await self._kill(number, is_last=number == count)
        if count > 1:
            self._print_sum(count)
        if self.failures:
            raise CommandFailed(f"{len(self.failures)} of {count} answers broke; the first: {self.failures[0]}")

    async def _kill(self, number: int, *, is_last: bool) -> None:
        for left in reversed(range(_ATTEMPTS)):
            restarts = [part.restarts for part in self.mesh.parts]
            killed, was_late = await self._ask(number, left)
            # On a busy machine this process may read the first piece of an answer when the last one is computed.
            is_repeated = was_late and left > 0
            for part, before in zip(self.mesh.parts, restarts, strict=True):
                if part in killed and (is_repeated or not is_last):
                    await part.restarted(before)
            if not is_repeated:
                return

    async def _ask(self, number: int, left: int) -> tuple[Sequence[SupervisedPart], bool]:
        """Ask the question, kill the engine meanwhile, and print what happened. Only the first answer is shown.

        Returns what was killed, and whether it had computed the whole answer. ``left``: attempts after this one.
        """
        loop, killed = asyncio.get_running_loop(), list[SupervisedPart]()
        is_first = left == _ATTEMPTS - 1
        is_shown = is_first and number == 1

        async def crash() -> None:
            killed.append(self.mesh.crash_engine())

        def interrupt() -> None:
            asyncio.run_coroutine_threadsafe(crash(), loop).result()  # the loop owns the parts
            if is_shown:
                self.console.print(Text(f" [{killed[0].spec.name} is killed]", "bold red"), end="")

        after = len(self.text) // _KILLED_AT if is_first else 1
        watch = InterruptedAnswer(after, interrupt, _print_piece if is_shown else None)
        if is_shown:
            self.console.print(_spoken(str(self.body["model"]), ""), end="")
        try:
            answer = await asyncio.to_thread(stream_chat, self.server, self.body, watch)
        except RequestFailed as error:
            self.failures.append(str(error))
            self.console.print(f"\nkill {number}: the answer broke: {error}", style="red", markup=False)
            return killed, False
        engine = killed[0].spec.name
        if was_late := watch.pause is None or answer.timeline["decode_engine"] == engine:
            rest = "the question is asked once more" if left else "nothing was left for another engine"
            line = f"{engine} had computed the whole answer before it ended; {rest}"
        else:
            line = self._continued(answer, watch, engine)
        self.console.print("\n\n" if is_shown else "", f"kill {number}: {line}", sep="", markup=False)
        return killed, was_late

    def _continued(self, answer: Answer, watch: InterruptedAnswer, killed: str) -> str:
        """Count an answer with which another engine went on, and return what happened."""
        assert watch.pause is not None
        self.pauses.append(watch.pause)
        is_same = answer.text == self.text
        self.num_different += not is_same
        text = "the same" if is_same else "another one, because numbers are rounded differently there"
        return (
            f"{killed} ended after {watch.killed_after} of {len(answer.text)} characters; "
            f"{answer.timeline['decode_engine']} went on after {watch.pause * 1e3:.0f} ms, and the text is {text}"
        )

    def _print_sum(self, count: int) -> None:
        pauses = self.pauses or [0.0]
        self.console.print(
            f"\n{count} kills during answers: {len(self.failures)} broken, {len(self.pauses)} continued by another "
            f"engine, {self.num_different} with another text; pause: median {1e3 * statistics.median(pauses):.0f} ms, "
            f"longest {1e3 * max(pauses):.0f} ms; load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            markup=False,
        )


def _spoken(name: str, text: str) -> Text:
    return Text.assemble((name, "bold"), f"  {text}")


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _print_answer_end(console: Console, answer: Answer) -> None:
    console.print("\n")
    console.print(timeline_table(answer))
