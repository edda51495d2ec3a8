"""A mesh that records its requests: prompts on one engine, decoding on others with few blocks, so that prefixes are
hit, blocks move and requests are preempted."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.mesh.offline_requests import ENGINE, Asked, Outcome, draw, over_http
from tests.mesh.split import SplitMesh
from tokenloom.offline.replay import Replayed, Replayer, options_of
from tokenloom.request.request_records import RecordedRequest, read_records

OPTIONS = {name: ENGINE[name] for name in ("num_threads", "max_model_len", "num_kv_blocks")}
"""Of the engine that replays: what decides no token."""
FEW_BLOCKS = 20
"""Of engines that decode: enough for two of the longest requests."""
_WAIT_SECONDS = 300.0
"""For an answer: the crowd waits for blocks, two requests at a time, and other work may have the processors."""


@asynccontextmanager
async def recording(
    socket_dir: Path, folder: Path, roles: tuple[str, ...] = ("prefill", "decode"), **options: Any
) -> AsyncIterator[tuple[SplitMesh, httpx.AsyncClient]]:
    """``options``: more of the engines'."""
    mesh = SplitMesh(
        socket_dir,
        roles,
        engine={**ENGINE, "worker": "model", **options},
        decode={"num_kv_blocks": FEW_BLOCKS},
        output_processor={"request_record_dir": folder},
    )
    async with mesh.running(), mesh.http(timeout=_WAIT_SECONDS) as http:
        yield mesh, http


def crowd(number: int = 8) -> list[Asked]:
    """Return long requests with a common beginning, of which the blocks hold two at a time."""
    common = random.Random(1).choices(range(3, 2048), k=60)
    fields = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8}
    return [Asked(-each, [*common, 3 + each], [], {**fields, "seed": each}, False) for each in range(1, number + 1)]


async def record(socket_dir: Path, folder: Path, seeds: Iterable[int], **options: Any) -> list[Outcome]:
    """Send the random requests of these seeds, and a crowd, to such a mesh; return what came."""
    async with recording(socket_dir, folder, **options) as (mesh, http):
        outcomes = await over_http(http, [*crowd(), *map(draw, seeds)])
        prefill, decode = mesh.of_role("prefill"), mesh.of_role("decode")
        assert prefill.stats.prefix_cache_hits
        assert decode.stats.kv_blocks_received
        assert decode.stats.num_preemptions
        assert not decode.recomputes()
    return outcomes


def records(folder: Path) -> list[RecordedRequest]:
    """Return the records of a folder, in which nothing is damaged."""
    found = list(read_records(folder))
    assert all(isinstance(each, RecordedRequest) for each in found)
    return [each for each in found if isinstance(each, RecordedRequest)]


def replayed(some: list[RecordedRequest], options: Mapping[str, Any] = OPTIONS) -> list[Replayed]:
    """Replay records in this process."""
    replayer = Replayer(some[0].path, {**options_of(some[0]), **options})
    try:
        return replayer.replay(some)
    finally:
        replayer.close()


async def check_replay(folder: Path, outcomes: list[Outcome]) -> None:
    """Replay what :func:`record` has recorded: everything that was answered comes again."""
    found = records(folder)
    given = sorted(sample.token_ids for outcome in outcomes for sample in outcome.samples if sample.token_ids)
    outputs = [output for each in found for output in each.outputs]
    answered = [output.token_ids for output in outputs if output.token_ids and output.finish_reason != "error"]
    assert sorted(answered) == given
    assert {leg.kind for output in outputs for leg in output.legs} >= {"prefill", "decode"}
    assert any(leg.preempted_at for output in outputs for leg in output.legs)
    results = await asyncio.to_thread(replayed, found)
    assert [(each.record.id, each.differences) for each in results if each.differences] == []
    refusals = {each.refusal for each in results if each.refusal}
    assert refusals <= {"it has generated no token"}
    assert sum(each.is_equal for each in results) > 0.8 * len(outcomes)
    assert not any(each.notes for each in results)
