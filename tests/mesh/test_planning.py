"""``tokenloom plan`` and its controller on a mesh that runs: they see its queues, and no request is lost in a flip."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON
from tests.mesh.split import SplitMesh
from tests.mesh.test_disaggregation import SLOW_PREFILL, prompt_of
from tests.mesh.test_mutual_tls import channels_of
from tests.plain_text import PLAIN_TEXT
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.planner.controller import Controller
from tokenloom.planner.demand import ROLES, Goals, PlannedRole
from tokenloom.planner.planner import FLIP_SECONDS, Flip, Limits, Plan
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.supervisor.certificates import make_certificates

ONE_AND_THREE = ("prefill", "decode", "decode", "decode")
QUEUE = [prompt_of(600, seed) for seed in range(8)]
SLOWER = {**SLOW_PREFILL, "hash_step_seconds": 0.02}
LOOK_SECONDS = 1.0
OVER_TLS = {"kv_transports": ("socket",), "kv_socket_listen": "127.0.0.1:0"}


class Looks:
    """A controller whose clock passes a second at each look: an engine is spare only after a minute."""

    def __init__(self, mesh: SplitMesh) -> None:
        self._now = 1000.0
        self.controller = Controller(
            channels_of(mesh.certificates, "planner") if mesh.certificates else Channels(),
            mesh.address("coordinator-0"),
            Goals(),
            Limits(most=4),
            clock=lambda: self._now,
        )

    async def look(self) -> Plan:
        self._now += LOOK_SECONDS
        (plan,) = (await self.controller.plan()).values()
        return plan

    async def until(self, holds: Callable[[Plan], object]) -> Plan:
        async with asyncio.timeout(SOON):
            while not holds(plan := await self.look()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return plan


async def test_the_command_prints_and_exports_what_it_would_do_and_does_nothing(
    socket_dir: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path, days=30)
    (tmp_path / "operator.key").unlink()  # the planner needs no certificate but its own
    async with SplitMesh(socket_dir, ONE_AND_THREE, certificates=tmp_path).running() as mesh:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            metrics = f"127.0.0.1:{free.getsockname()[1]}"
        command = ("plan", "--dry-run", "--every", "1", "--json", "--metrics", metrics, "--certs", str(tmp_path))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenloom.cli.main", *command, "--coordinator", mesh.address("coordinator-0")),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(SOON):
                first, second = [json.loads(await process.stdout.readline()) for _ in range(2)]
            async with httpx.AsyncClient(verify=PLAIN_TEXT) as http:
                exported = (await http.get(f"http://{metrics}/metrics")).text
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert first == second
        assert first["engines"] == first["wanted"] == {"prefill": 1, "decode": 3}
        assert first["flips"] == []
        assert first["replicas"] == {"engine": 4}
        assert f'tokenloom_planned_replicas{{model_name="{first["model"]}",set="engine"}} 4.0' in exported
        assert sorted(_roles(mesh).values()) == ["decode", "decode", "decode", "prefill"]


async def test_a_growing_queue_of_prompts_gets_a_decode_engine_and_every_request_survives(
    socket_dir: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path, days=30)
    mesh = SplitMesh(socket_dir, ONE_AND_THREE, engine=OVER_TLS, prefill=SLOWER, certificates=tmp_path)
    async with mesh.running(), mesh.http() as http:
        looks = Looks(mesh)
        await _measure(mesh, http)
        for _ in range(int(FLIP_SECONDS / LOOK_SECONDS) + 1):
            assert not (await looks.look()).flips, "a mesh that rests needs no change"
        async with asyncio.TaskGroup() as group:
            long = Answer()
            group.create_task(ask(http, prompt_of(40), 200, long))
            # One token each needs no decode engine, so that all but the one of the long answer are spare.
            waiting = [group.create_task(ask(http, prompt, 1)) for prompt in QUEUE]
            plan = await looks.until(lambda plan: plan.flips)
            flipped = {flip.engine for flip in plan.flips}
            assert all(
                flip.role == PlannedRole.PREFILL and _roles(mesh)[flip.engine] == PlannedRole.DECODE
                for flip in plan.flips
            )
            assert plan.engines == {PlannedRole.PREFILL: 1 + len(flipped), PlannedRole.DECODE: 3 - len(flipped)}
            assert plan.engines[PlannedRole.DECODE] >= 1
            assert plan.replicas == {"engine": 4}
            assert not all(task.done() for task in waiting)
            assert await looks.controller.apply(plan.flips) == []
            for flip in plan.flips:
                await _until(mesh, flip)
            later = [group.create_task(ask(http, prompt_of(610, seed), 4)) for seed in range(4)]
        assert long.token_ids == mesh.expected(prompt_of(40), 200)
        for prompt, task in zip(QUEUE, waiting, strict=True):
            assert task.result().token_ids == mesh.expected(prompt, 1)
        for seed, task in enumerate(later):
            assert task.result().token_ids == mesh.expected(prompt_of(610, seed), 4)
        assert flipped & {task.result().timeline["prefill_engine"] for task in later}
        await mesh.check_nothing_is_left()


async def test_an_engine_that_goes_back_to_decode_finishes_its_prompts_first(socket_dir: Path) -> None:
    roles = ("prefill", "prefill", "decode")
    async with SplitMesh(socket_dir, roles, prefill=SLOW_PREFILL).running() as mesh, mesh.http() as http:
        looks, engine = Looks(mesh), mesh.engines[1]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(http, prompt, 4)) for prompt in QUEUE]
            await engine.until(lambda engine: engine.core.scheduler.requests)
            flip = Flip(engine.name, engine.settings.listen, PlannedRole.DECODE)
            assert await looks.controller.apply([flip]) == []
            await _until(mesh, flip)
            later = await ask(http, prompt_of(620), 4)
        for prompt, task in zip(QUEUE, asked, strict=True):
            assert task.result().token_ids == mesh.expected(prompt, 4)
        assert engine.name in {task.result().timeline["prefill_engine"] for task in asked}
        assert later.timeline["prefill_engine"] == mesh.engines[0].name
        assert later.token_ids == mesh.expected(prompt_of(620), 4)
        await mesh.check_nothing_is_left()


def _roles(mesh: SplitMesh) -> dict[str, PlannedRole]:
    """Return the role of each engine, as the coordinator knows it."""
    service: Any = mesh.coordinator.service
    entries = snapshot_of(service.servicer._registry).engines
    return {entry.identity.engine_id: ROLES[entry.report.role] for entry in entries}


async def _until(mesh: SplitMesh, flip: Flip) -> None:
    """The coordinator knows the engine in its new role."""
    async with asyncio.timeout(SOON):
        while _roles(mesh)[flip.engine] != flip.role:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def _measure(mesh: SplitMesh, http: httpx.AsyncClient) -> None:
    """Let prompts wait behind each other once, so that the speed of the prefill engine is known; then all rests."""
    await asyncio.gather(*(ask(http, prompt_of(300, seed), 1) for seed in range(8)))
    await mesh.check_nothing_is_left()
