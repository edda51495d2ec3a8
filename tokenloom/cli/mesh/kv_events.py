"""``tokenloom kv-events`` follows what an engine's prefix cache stores and removes, of this mesh or of vLLM."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..failures import reported

if TYPE_CHECKING:
    from tokenloom.services.runtime.telemetry.kv_events import EventBatch, KVEventReader


def kv_events(
    endpoint: Annotated[str, typer.Argument(help="Where the engine publishes, for example tcp://127.0.0.1:5557.")],
    replay: Annotated[
        str | None, typer.Option(help="Where missed batches are asked for; otherwise they are lost.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Beginning of the topics to follow; by default all.")] = "",
    key: Annotated[Path | None, typer.Option(help="File of our secret CURVE key.")] = None,
    server_key: Annotated[Path | None, typer.Option(help="File of the engine's public CURVE key; with --key.")] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="End after so many batches; by default Ctrl-C ends.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
) -> None:
    """Follow the events of an engine's prefix cache, in vLLM's published format.

    The engine needs --kv-events-config. Batches that were missed are asked for again; the last line counts them.
    """
    # Here, because it takes ZeroMQ, which the help does not need.
    from tokenloom.services.runtime.telemetry.kv_events import KVEventReader, KVEventSource

    reader = KVEventReader(KVEventSource(endpoint, replay, topic, key, server_key))
    with reported():
        try:
            with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
                asyncio.run(_follow(reader, batches, as_json=as_json))
        finally:
            counts = f"{reader.num_replayed} replayed, {reader.num_lost} lost, {reader.num_restarts} restarts"
            typer.echo(f"{reader.num_batches} batches, {counts}", err=True)


async def _follow(reader: "KVEventReader", most: int | None, *, as_json: bool) -> None:
    async with contextlib.aclosing(reader.read()) as following:
        async for number, batch in following:
            for line in _lines(number, batch, as_json=as_json):
                typer.echo(line)
            if most is not None and reader.num_batches >= most:
                return


def _lines(number: int, batch: "EventBatch", *, as_json: bool) -> list[str]:
    import msgspec

    lines = []
    for event in batch.events:
        fields = msgspec.to_builtins(event)
        if as_json:
            lines.append(json.dumps({"sequence": number, "ts": batch.ts, "rank": batch.data_parallel_rank, **fields}))
        else:
            num_blocks = len(fields.get("block_hashes", ()))
            lines.append(f"{number} {fields['type']}" + (f" {num_blocks}" if num_blocks else ""))
    return lines
