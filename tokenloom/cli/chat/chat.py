"""``tokenloom chat`` holds a conversation on the terminal or asks one question from a script, ``complete`` continues a
text, ``transcribe`` writes what is said in a sound."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenloom.process.uncollected_imports import uncollected_imports

from ..failures import RequestFailed, reported
from ..options import MaxTokens, SampleSeed, Stop, Temperature, TopK, TopP, file_option, given
from ..server import ApiKey, BaseUrl, ServedModel, Server, connect, objects, reason
from ..streams import with_piped
from ..tables import plain_console
from .chat_client import Answer, stream_chat
from .conversation import (
    AskAgain,
    Conversation,
    EndOfChat,
    Message,
    command_names,
    image_part,
    run_command,
    sound_part,
    video_part,
)

if TYPE_CHECKING:
    from .markdown import MarkdownView


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Question to ask once; piped input is appended.", show_default=False)
    ] = None,
    base_url: BaseUrl = None,
    model: ServedModel = None,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    image: Annotated[
        list[Path] | None, file_option("Image file that the first question shows; may be repeated.")
    ] = None,
    audio: Annotated[
        list[Path] | None, file_option("Sound file that the first question plays; may be repeated.")
    ] = None,
    video: Annotated[
        list[Path] | None, file_option("Video file that the first question shows; may be repeated.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: SampleSeed = None,
    stop: Stop = None,
    markdown: Annotated[
        bool | None,
        typer.Option(
            "--markdown/--plain",
            help="Show headings, tables and code as such, or as they are written. [default: as such on a terminal]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as an object, with its usage.")] = False,
) -> None:
    """Chat with a served model on the terminal, or ask one question from PROMPT or a pipe."""
    with reported():
        server = connect(base_url, api_key)
        sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop)
        question = with_piped(prompt)
        if question is None and as_json:
            raise typer.BadParameter("needs a PROMPT or piped input", param_hint="--json")
        if question is None and not sys.stdin.isatty():
            raise typer.BadParameter("name a question, or pipe one in", param_hint="PROMPT")
        media = [*map(image_part, image or ()), *map(video_part, video or ()), *map(sound_part, audio or ())]
        session = ChatSession(server, model or server.model(), Conversation(system), sampling, media, markdown=markdown)
        if question is None:
            session.talk()
        else:
            answer = session.ask(question, quiet=as_json)
            answered = {name: value for name, value in asdict(answer).items() if name != "timeline"}
            print(json.dumps(answered, ensure_ascii=False) if as_json else "")


class ChatSession:
    """Holds a conversation with one model."""

    def __init__(
        self,
        server: Server,
        model: str,
        conversation: Conversation,
        sampling: dict[str, Any],
        media: Sequence[Message] = (),
        *,
        markdown: bool | None = None,
    ) -> None:
        """``media``: parts that stand before the first question. ``markdown``: whether answers are shown as Markdown;
        None: on a terminal that can."""
        self._server = server
        self._media = media
        self._model = model
        self._conversation = conversation
        self._sampling = sampling
        self._console = plain_console(soft_wrap=True)
        can = self._console.is_terminal and not self._console.is_dumb_terminal
        self._markdown = can if markdown is None else markdown
        self._thinks = False

    def talk(self) -> None:
        """Read lines until the user leaves. A failed or stopped answer does not end the conversation."""
        self._console.print(f"{self._model} at {self._server.url}; /help lists commands, Ctrl-D leaves", style="dim")
        for line in _lines():
            try:
                if not line.startswith("/"):
                    self._exchange(line)
                elif shown := run_command(line, self._conversation):
                    self._console.print(shown, style="dim")
            except EndOfChat:
                return
            except AskAgain as again:
                self._exchange(again.args[0])

    def ask(self, question: str, *, quiet: bool = False) -> Answer:
        """Ask a question; print the answer as it arrives unless `quiet`. Raises `RequestFailed`."""
        self._conversation.ask(question, self._media)
        self._media = ()
        body = {"model": self._model, "messages": self._conversation.messages, **self._sampling}
        pieces: list[str] = []
        view = self._view() if self._markdown and not quiet else None

        def on_text(text: str) -> None:
            pieces.append(text)
            if view is not None:
                self._end_thought()
                view.add(text)
            elif not quiet:
                print(text, end="", flush=True)

        try:
            return stream_chat(self._server, body, on_text, None if quiet else self._show_thought)
        finally:
            if view is not None:
                view.end()
            self._conversation.answer("".join(pieces))  # a stopped answer is kept as far as it arrived

    def _exchange(self, question: str) -> None:
        try:
            answer = self.ask(question)
        except KeyboardInterrupt:
            self._console.print("\nstopped", style="dim")
        except RequestFailed as error:
            self._conversation.take_back()
            self._console.print(f"\n{error}", style="red")
        else:
            self._console.print(f"\n{_summary(answer)}", style="dim")

    def _view(self) -> "MarkdownView":
        with uncollected_imports():
            from .markdown import MarkdownView  # here, because its parser costs time, which the help does not need

        return MarkdownView(plain_console())

    def _show_thought(self, text: str) -> None:
        self._thinks = True
        self._console.print(text, end="", style="dim")

    def _end_thought(self) -> None:
        """Begin a line of its own for the answer after a reasoning."""
        if self._thinks:
            self._thinks = False
            self._console.print("\n")


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, except blank ones; Ctrl-C discards a line."""
    _edit_lines()
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("… ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line.strip()


def _edit_lines() -> None:
    """Enable line editing with a history and completion of commands, if Python was built with readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: [*(n for n in command_names() if n.startswith(text)), None][state])
    readline.parse_and_bind("tab: complete")


def _summary(answer: Answer) -> str:
    count = answer.usage.get("completion_tokens")
    tokens = "" if count is None else f"{count} tokens, "
    cut = ", cut off at the length limit" if answer.finish_reason == "length" else ""
    return f"{tokens}first after {answer.seconds_to_first_token * 1e3:.0f} ms, {answer.seconds:.2f} s in total{cut}"


def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; piped input is appended.", show_default=False)
    ] = None,
    base_url: BaseUrl = None,
    model: ServedModel = None,
    api_key: ApiKey = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: SampleSeed = None,
    stop: Stop = None,
    echo: Annotated[bool, typer.Option(help="Print PROMPT before its continuation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's complete answer.")] = False,
) -> None:
    """Continue a text with a served model, from PROMPT or a pipe."""
    with reported():
        text = with_piped(prompt)
    if text is None:
        raise typer.BadParameter("is missing, and no input was piped in", param_hint="PROMPT")
    with reported():
        server = connect(base_url, api_key)
        sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop)
        body = {"model": model or server.model(), "prompt": text, **sampling}
        if as_json:
            whole = {**body, "echo": True} if echo else body
            print(json.dumps(server.post("/v1/completions", whole).value(), ensure_ascii=False))
            return
        if echo:
            print(text, end="", flush=True)
        finished = False
        for event in server.stream("/v1/completions", {**body, "stream": True}):
            for choice in objects(event.get("choices")):
                print(choice.get("text") or "", end="", flush=True)
                finished = finished or choice.get("finish_reason") is not None
        print()
        if not finished:
            raise RequestFailed("the answer is incomplete: the connection ended early")


_SILENT_SECONDS = 3600.0
"""An answer that is not streamed comes when the whole sound was heard."""


def transcribe(
    file: Annotated[
        Path, typer.Argument(help="Sound: flac, mp3, mp4, m4a, ogg, wav or webm.", exists=True, dir_okay=False)
    ],
    language: Annotated[
        str | None, typer.Option(help="Its language, as in de or german; by default it is found out.")
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Write it in English.")] = False,
    form: Annotated[
        Literal["text", "srt", "vtt", "json", "verbose_json"], typer.Option("--format", help="Form of the answer.")
    ] = "text",
    prompt: Annotated[str | None, typer.Option(help="What was said before, or names as they are written.")] = None,
    base_url: BaseUrl = None,
    model: ServedModel = None,
    api_key: ApiKey = "",
) -> None:
    """Write what is said in a sound."""
    with reported():
        server = connect(base_url, api_key, _SILENT_SECONDS)
        fields = given(model=model or server.model(), language=language, prompt=prompt, response_format=form)
        route = "translations" if translate else "transcriptions"
        if form == "text":
            fields["stream"] = "true"
        for line in server.upload(f"/v1/audio/{route}", file, fields):
            if form != "text":
                print(line.decode(), end="")
            elif line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RequestFailed(reason(event))
                print(event.get("delta", ""), end="", flush=True)
        if form in ("text", "json", "verbose_json"):
            print()
