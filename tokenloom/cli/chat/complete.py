"""``tokenloom complete`` continues a text."""

import json
from typing import Annotated

import typer

from ..failures import RequestFailed, reported
from ..options import MaxTokens, SampleSeed, Stop, Temperature, TopK, TopP, given
from ..server import ApiKey, BaseUrl, ServedModel, connect, objects
from ..streams import with_piped


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
