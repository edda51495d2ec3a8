"""Weights change under load: each answer has the tokens of the one version that it names, and none is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.mesh.asking import Answer, ask
from tests.mesh.dialects import DIALECTS, VECTORS
from tests.mesh.harness import SOON, Mesh
from tests.mesh.test_mutual_tls import certificates, peer_of
from tokenloom import send_weights
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import InvalidArgument

__all__ = ["certificates"]  # a fixture
ADMIN = {"authorization": "Bearer root"}
KEYS = {"admin_api_key": ("root",)}
PROMPTS = [list(range(5 + start, 40 + 9 * start)) for start in range(4)]
NUM_TOKENS = 48
LONG = 600
"""Tokens that take longer than a change of weights takes to begin."""

Expected = dict[str, list[list[int]]]
"""By version, the tokens after each prompt."""


def trained() -> dict[str, torch.Tensor]:
    """The demo model's weights after a step of something."""
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    return {name: -tensor if name == "model.norm.weight" else tensor for name, tensor in tensors.items()}


def version_of(path: str | Path) -> str:
    return weights_fingerprint(Path(path)).hex()[:16]


async def load(http: httpx.AsyncClient, path: str | Path, mode: str = "wait") -> None:
    response = await http.post(f"/reload_weights?path={path}&mode={mode}", headers=ADMIN)
    assert response.status_code == 200, response.text


async def greedy(http: httpx.AsyncClient, index: int, num_tokens: int = NUM_TOKENS, **fields: Any) -> Answer:
    return await ask(http, PROMPTS[index], num_tokens, **fields)


@asynccontextmanager
async def running(
    directory: Path,
    tmp_path: Path,
    num_tokens: int = NUM_TOKENS,
    *,
    is_split: bool = False,
    lease_seconds: float = 60.0,
    gateway: dict[str, Any] = KEYS,
    **parts: Any,
) -> AsyncIterator[tuple[Mesh, str, Expected]]:
    """A mesh, other weights, and what both versions answer. ``is_split``: one engine prefills, the other decodes."""
    engine = {"worker": "model", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 1024}
    engine |= {"staged_weights_dir": str(tmp_path / "staged"), "kv_lease_seconds": lease_seconds}
    engine |= {"weights_scrub_seconds": 0.1}  # weights that are sent are no damage, however often they are compared

    def options(index: int) -> dict[str, Any]:
        return engine | ({"role": ("prefill", "decode")[index], "kv_transports": ("shm",)} if is_split else {})

    async with Mesh(directory, engine=options, gateway=gateway, **parts).running() as mesh, mesh.http() as http:
        path = await send_weights(trained(), mesh.coordinator.settings.listen, certificates=mesh.certificates)
        expected: Expected = {}
        for each in (path, DEMO_MODEL):
            await load(http, each)
            answers = [await greedy(http, index, num_tokens) for index in range(len(PROMPTS))]
            expected[version_of(each)] = [answer.token_ids for answer in answers]
            assert {answer.weights_version for answer in answers} == {version_of(each)}
        old, new = expected.values()
        assert all(one != other for one, other in zip(old, new, strict=True)), "otherwise nothing is tested"
        yield mesh, path, expected
        assert not any("damaged_weights" in part.host.fall_backs.counts for part in mesh.parts if part.host is not None)


async def ask_on(http: httpx.AsyncClient, stop: asyncio.Event, index: int, answers: list[tuple[int, Answer]]) -> None:
    while not stop.is_set():
        answers.append((index, await greedy(http, index)))


def check(answers: list[tuple[int, Answer]], expected: Expected, *, kills: bool) -> None:
    for index, answer in answers:
        if kills and answer.error is not None:
            # Its output processor was lost when no engine had the weights any more with which it had begun.
            assert answer.error["code"] == "weights_replaced"
            assert any(answer.token_ids == each[index][: len(answer.token_ids)] for each in expected.values())
            continue
        assert answer.error is None
        assert answer.finish_reason == "length"
        assert answer.token_ids == expected[answer.weights_version][index]


@pytest.mark.parametrize(("kills", "is_split"), [(False, False), (False, True), (True, False)])
async def test_under_load_no_answer_mixes_versions_and_none_is_lost(
    socket_dir: Path, tmp_path: Path, kills: bool, is_split: bool
) -> None:
    """With ``kills`` an output processor is lost each time, whose requests another one continues."""
    async with (
        running(socket_dir, tmp_path, engines=2, output_processors=2, is_split=is_split) as (mesh, path, expected),
        mesh.http() as http,
        asyncio.timeout(4 * SOON),
    ):
        answers, stop = list[tuple[int, Answer]](), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for index in (*range(len(PROMPTS)), 0, 1):
                tasks.create_task(ask_on(http, stop, index, answers))
            for each in (path, DEMO_MODEL, path):
                before = len(answers)
                await mesh.until_running(2)
                loading = tasks.create_task(load(http, each))
                if kills:
                    await mesh.output_processors[0].kill()
                    await mesh.output_processors[0].start()
                await loading
                while len(answers) < before + 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stop.set()
        check(answers, expected, kills=kills)
        assert {answer.weights_version for _, answer in answers} - {""} == expected.keys()
        assert [(await greedy(http, 0)).weights_version] == [version_of(path)]


async def test_the_halves_of_a_peers_request_have_the_same_weights(
    socket_dir: Path, tmp_path: Path, certificates: Path
) -> None:
    operator = {
        f"operator_tls_{name}": certificates / f"operator.{end}" for name, end in (("cert", "crt"), ("key", "key"))
    }
    gateway = KEYS | operator | {"internal_listen": "127.0.0.1:0"}
    options = {"gateway": gateway, "certificates": certificates}
    async with (
        running(socket_dir, tmp_path, 9, is_split=True, engines=2, **options) as (mesh, path, expected),
        mesh.http() as http,
        peer_of(certificates, mesh) as peer,
    ):
        hold = {"sampling_params": {"max_tokens": 1, "ignore_eos": True, "temperature": 0}}
        read = {"sampling_params": {"max_tokens": 9, "ignore_eos": True, "temperature": 0}}
        for each, then in ((DEMO_MODEL, DEMO_MODEL), (DEMO_MODEL, path), (path, path)):
            await load(http, each)
            body = {"token_ids": PROMPTS[2], **hold, "kv_transfer_params": {"do_remote_decode": True}}
            first = (await peer.post("/inference/v1/generate", json=body)).json()
            assert first["kv_transfer_params"]["remote_weights"][:16] == version_of(each)
            if then != each:
                await load(http, then, "abort")  # with "wait" when the lease has ended
            body = {"token_ids": PROMPTS[2], **read, "kv_transfer_params": first["kv_transfer_params"]}
            second = await peer.post("/inference/v1/generate", json=body)
            if then != each:
                assert (second.status_code, second.json()["error"]["code"]) == (503, "weights_replaced")
                continue
            assert second.status_code == 200, second.text
            (choice,) = second.json()["choices"]
            assert (choice["token_ids"], choice["weights_version"]) == (expected[version_of(each)][2], version_of(each))


async def test_answers_of_every_form_name_the_weights(socket_dir: Path, tmp_path: Path) -> None:
    async with running(socket_dir, tmp_path, 4) as (mesh, path, _), mesh.http() as http:
        for each in (path, DEMO_MODEL):
            await load(http, each)
            forms = {**DIALECTS, **{f"vectors, {name}": ask for name, ask in VECTORS.items()}}
            found = {name: await ask(mesh, 4) for name, ask in forms.items()}
            assert found == dict.fromkeys(forms, (version_of(each), False))


@pytest.mark.parametrize("by_pause", [False, True])
async def test_requests_may_go_on_with_new_weights_and_name_both(
    socket_dir: Path, tmp_path: Path, by_pause: bool
) -> None:
    async with (
        running(socket_dir, tmp_path, LONG) as (mesh, path, expected),
        mesh.http() as http,
        asyncio.timeout(4 * SOON),
    ):
        live = [Answer() for _ in PROMPTS]
        asked = [asyncio.create_task(greedy(http, index, LONG, answer=answer)) for index, answer in enumerate(live)]
        for answer in live:
            await answer.begun.wait()
        if by_pause:
            await http.post("/pause?mode=keep", headers=ADMIN)
        await load(http, path, "keep")
        if by_pause:
            await http.post("/resume", headers=ADMIN)
        await asyncio.gather(*asked)
        old, new = version_of(DEMO_MODEL), version_of(path)
        assert f"{old}+{new}" in {answer.weights_version for answer in live}
        for index, answer in enumerate(live):
            assert (answer.error, len(answer.token_ids)) == (None, LONG)
            if answer.weights_version == old:  # it had ended before
                assert answer.token_ids == expected[old][index]
                continue
            pairs = zip(answer.token_ids, expected[old][index], strict=True)
            num_old = next((at for at, (one, other) in enumerate(pairs) if one != other), LONG)
            # The rest is what the new weights say after the prompt and the tokens so far.
            prompt = [*PROMPTS[index], *answer.token_ids[:num_old]]
            again = await ask(http, prompt, LONG - num_old)
            assert 0 < num_old < LONG
            assert again.token_ids == answer.token_ids[num_old:]
            assert again.weights_version == new


async def test_abort_ends_what_runs(socket_dir: Path, tmp_path: Path) -> None:
    async with (
        running(socket_dir, tmp_path, LONG) as (mesh, path, expected),
        mesh.http() as http,
        asyncio.timeout(SOON),
    ):
        answer = Answer()
        asked = asyncio.create_task(greedy(http, 0, LONG, answer=answer))
        await answer.begun.wait()
        await load(http, path, "abort")
        await asked
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < LONG
        assert answer.token_ids == expected[version_of(DEMO_MODEL)][0][: len(answer.token_ids)]
        assert (await greedy(http, 0, LONG)).token_ids == expected[version_of(path)][0]


async def test_only_an_administrator_changes_weights(socket_dir: Path, tmp_path: Path) -> None:
    async with running(socket_dir, tmp_path) as (mesh, path, expected), mesh.http() as http:
        for headers in ({}, {"authorization": "Bearer other"}):
            refused = await http.post(f"/reload_weights?path={path}", headers=headers)
            assert refused.status_code in (401, 403)
        assert (await greedy(http, 1)).token_ids == expected[version_of(DEMO_MODEL)][1]
        part = {name: tensor for name, tensor in trained().items() if name == "model.norm.weight"}
        with pytest.raises(InvalidArgument, match="lacks "):
            await send_weights(part, mesh.coordinator.settings.listen)
