"""Compares what a mesh with prefill and decode on two engines answers with transformers' own tokens."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import MODEL, SOON
from tests.mesh.split import SplitEngine, SplitMesh
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import Reference, add_demo_tokenizer, make_small_reference
from tokenloom.engine_core.data.messages import EngineCoreOutputs

LONGEST = 80
"""Tokens of a prompt; windows are shorter."""
ENGINE = {"worker": "model", "served_model_name": MODEL, "max_model_len": 112, "max_num_batched_tokens": 48}
FEW_BLOCKS = 9
"""Enough for one of the longest requests, not for two."""
FEW_BLOCKS_OF_GROUPS = 17
"""The same where layers with a window have blocks of their own."""
FEW_BLOCKS_OF_CHUNKS = 31
"""The same for Llama 4, of whose layers each has blocks of its own."""


async def check_served_model(name: str, socket_dir: Path, directory: Path) -> None:
    """Serve a small random model of ``tests.parity.reference`` from ``directory``: prompts in chunks on one engine,
    decoding in a small pool on another one, with prefix hits and preemptions."""
    reference = await asyncio.to_thread(make_small_reference, name, directory, LONGEST)
    num_blocks = FEW_BLOCKS_OF_GROUPS if "gemma" in name or name == "gpt_oss" else FEW_BLOCKS
    if name == "llama4_text":
        num_blocks = FEW_BLOCKS_OF_CHUNKS
    await check_served_reference(reference, socket_dir, num_blocks=num_blocks)


async def check_served_reference(reference: Reference, socket_dir: Path, *, num_blocks: int, **options: Any) -> None:
    """Do what :func:`check_served_model` does with a reference. ``num_blocks``: of the engine that decodes, which is to
    preempt. ``options``: more of the engines'."""
    # The parts of a mesh must agree on the tokenizer; clients send token ids.
    engine = {**ENGINE, **options, "model": str(add_demo_tokenizer(reference.path))}
    split = SplitMesh(socket_dir, engine=engine, decode={"num_kv_blocks": num_blocks})
    async with split.running() as mesh, mesh.http() as http:
        prefill, decode = mesh.of_role("prefill"), mesh.of_role("decode")
        await _ask_all(http, reference.cases, decode)
        assert decode.stats.kv_blocks_received >= len(reference.cases)
        assert not decode.recomputes()
        hits = prefill.stats.prefix_cache_hits
        async with asyncio.timeout(SOON):  # whether two long requests meet depends on how fast they come
            while True:
                await _ask_all(http, reference.cases, decode)
                if decode.stats.num_preemptions:
                    break
        assert prefill.stats.prefix_cache_hits > hits
        await mesh.check_nothing_is_left()


async def check_fail_over(reference: Reference, socket_dir: Path, **options: Any) -> None:
    """Kill the engine that decodes the reference's longest answer in the middle of it, and compare the tokens."""
    case = max(reference.cases, key=lambda case: (len(case.tokens), len(case.prompt)))
    engine = {**ENGINE, **options, "model": str(add_demo_tokenizer(reference.path))}
    split = SplitMesh(socket_dir, ("prefill", "decode", "decode"), engine=engine)
    async with split.running() as mesh, mesh.http() as http:
        answer = await ask_and_kill(mesh, http, case.prompt, len(case.tokens))
        assert answer.token_ids == case.tokens
        await mesh.check_nothing_is_left()


async def ask_and_kill(
    mesh: SplitMesh, http: httpx.AsyncClient, prompt: list[int], num_tokens: int, **fields: Any
) -> Answer:
    """Kill the engine, of those that decode, which computes a completion, in the middle of it. Returns the answer."""
    prefill, *decodes = mesh.engines
    held = {decode: _HeldSteps(decode, num_tokens=6) for decode in decodes}
    answer = Answer()
    task = asyncio.create_task(ask(http, prompt, num_tokens, answer, **fields))
    await prefill.until(lambda _: len(answer.token_ids) > 2 and any(steps.is_held for steps in held.values()))
    (victim,) = (decode for decode, steps in held.items() if steps.is_held)
    assert not answer.finish_reason
    assert victim.stats.kv_blocks_received
    for other in decodes:
        if other is not victim:
            held[other].free()
    killing = asyncio.create_task(victim.kill())
    rest = [engine for engine in mesh.engines if engine is not victim]
    await prefill.until(lambda _: any(engine.core.scheduler.requests for engine in rest))
    held[victim].free()  # nothing that it computes reaches a client any more
    await killing
    await task
    assert answer.timeline["decode_engine"] != victim.name
    return answer


class _HeldSteps:
    """Holds an engine before its next step once a request has ``num_tokens`` of output, until it is freed."""

    def __init__(self, engine: SplitEngine, num_tokens: int) -> None:
        self.is_held = False
        self._core = engine.core
        self._num_tokens = num_tokens
        self._opened = threading.Event()
        calls = engine.client._calls
        assert calls is not None, "not started"
        self._step = calls.step
        calls.step = self._take  # type: ignore[assignment]

    def free(self) -> None:
        """Hold the engine no more."""
        self._opened.set()

    def _take(self) -> EngineCoreOutputs:
        if any(request.num_output_tokens >= self._num_tokens for request in self._core.scheduler.requests.values()):
            self.is_held = not self._opened.is_set()
            self._opened.wait(SOON)
        return self._step()


async def _ask_all(http: httpx.AsyncClient, cases: Sequence[Case], decode: SplitEngine) -> None:
    """Ask for all cases at once, each a request of its own, and compare the tokens."""
    loop = asyncio.get_running_loop()

    async def ask_all(prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        answers = await asyncio.gather(*(ask(http, *pair) for pair in zip(prompts, limits, strict=True)))
        assert {answer.timeline["decode_engine"] for answer in answers if len(answer.token_ids) > 1} <= {decode.name}
        return [answer.token_ids for answer in answers]

    def generate(prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        return asyncio.run_coroutine_threadsafe(ask_all(prompts, limits), loop).result()

    await asyncio.to_thread(assert_identical, cases, generate)
