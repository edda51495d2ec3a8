"""Prefill and decode engines that speculate: the tokens are those without drafts, through hand-over and fail-over."""

import asyncio
from pathlib import Path

from tests.mesh.asking import Answer, ask
from tests.mesh.split import POLL_SECONDS, SplitMesh
from tests.mesh.test_disaggregation import prompt_of
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}
LENGTHS = (1, 15, 16, 17, 33, 256, 500)


def verified(mesh: SplitMesh) -> SpecDecodingStats:
    """What the engines have counted, in all."""
    total = SpecDecodingStats()
    for engine in mesh.engines:
        if (stats := engine.stats.spec_decoding) is not None:
            total.num_draft_tokens += stats.num_draft_tokens
            total.num_accepted_tokens += stats.num_accepted_tokens
    return total


async def test_tokens_do_not_change(socket_dir: Path) -> None:
    decode = {**DRAFTS, "hash_draft_accuracy": 0.7, "num_kv_blocks": 130, "hash_step_seconds": 0.001}
    mesh = SplitMesh(socket_dir, ("prefill", "decode", "decode"), prefill=DRAFTS, decode=decode)
    async with mesh.running(), mesh.http() as http:
        shapes = [(prompt_of(length, seed), 5 + 7 * seed) for length in LENGTHS for seed in range(3)]
        answers = await asyncio.gather(*(ask(http, prompt, count) for prompt, count in shapes))
        for (prompt, count), answer in zip(shapes, answers, strict=True):
            assert answer.token_ids == mesh.expected(prompt, count)
            assert answer.usage["completion_tokens"] == count
            if count > 15:
                drafts = answer.timeline["drafts"]
                assert 0 < drafts["num_accepted_tokens"] < min(drafts["num_draft_tokens"], count)
        assert 0.2 < verified(mesh).num_accepted_tokens / verified(mesh).num_draft_tokens < 0.8
        await mesh.check_nothing_is_left()


async def test_an_engine_that_is_killed_while_it_speculates(socket_dir: Path) -> None:
    settings = {**DRAFTS, "hash_draft_accuracy": 0.5, "hash_step_seconds": 0.01}
    mesh = SplitMesh(socket_dir, ("prefill", "decode", "decode"), prefill=DRAFTS, decode=settings)
    async with mesh.running(), mesh.http() as http:
        answer = Answer()
        work = asyncio.create_task(ask(http, prompt_of(100), 200, answer))
        await answer.begun.wait()
        while len(answer.token_ids) < 20:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        (busy,) = [engine for engine in mesh.engines if engine.core.scheduler.requests]
        await busy.kill()
        await work
        assert answer.token_ids == mesh.expected(prompt_of(100), 200)
        assert answer.timeline["decode_engine"] != busy.name
