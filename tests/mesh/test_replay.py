"""Requests of a mesh are recorded, and computed again from their records: the same tokens come.

Here are few of them; ``tests/parity/test_replay.py`` replays more.
"""

import asyncio
from pathlib import Path

import torch

from tests.mesh.asking import ask
from tests.mesh.recorded import check_replay, record, recording, records, replayed
from tests.mesh.served_parity import ask_and_kill


async def test_random_requests_come_again(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    outcomes = await record(socket_dir, tmp_path / "records", range(5000, 5030))
    await check_replay(tmp_path / "records", outcomes)


async def test_a_request_whose_engine_was_killed_comes_again(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    prompt = [11, 500, 77, 23, 9, 1800, 42] * 4
    async with recording(socket_dir, tmp_path / "records", ("prefill", "decode", "decode")) as (mesh, http):
        answer = await ask_and_kill(mesh, http, prompt, 24, logprobs=2)
        await ask(http, prompt, 5)
    (one, other) = sorted(records(tmp_path / "records"), key=lambda each: -len(each.outputs[0].token_ids))
    (output,) = one.outputs
    assert output.token_ids == answer.token_ids
    assert [leg.kind for leg in output.legs] == ["prefill", "decode", "prefill", "decode"]
    assert output.legs[2].start >= 3
    assert {leg.num_threads for leg in output.legs} == {1}
    assert len({leg.epoch for leg in output.legs}) == 3, "a killed engine and those that went on"
    assert len(output.logprobs[0].ranks) == 24
    results = await asyncio.to_thread(replayed, [one, other])
    assert all(each.is_equal for each in results), results
