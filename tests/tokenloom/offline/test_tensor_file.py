"""Weights are sent to all engines of a mesh, or an error names which part does not take them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.mesh.harness import Mesh
from tokenloom import send_weights
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, Unavailable

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def other() -> Tensors:
    return {name: tensor * 2 for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items()}


async def test_all_engines_have_the_weights(socket_dir: Path, tmp_path: Path, other: Tensors) -> None:
    def settings(index: int) -> dict[str, str]:
        return {"staged_weights_dir": str(tmp_path / f"host-{index}" / "staged")}

    for index in range(2):
        (tmp_path / f"host-{index}").mkdir()
    async with Mesh(socket_dir, engines=2, engine=settings).running() as mesh:
        with pytest.raises(FailedPrecondition, match=r"different paths, which must be equal: engine-0: /.*engine-1"):
            await send_weights(other, mesh.coordinator.settings.listen)
        (first,), (second,) = ((tmp_path / f"host-{index}" / "staged").glob("*/") for index in range(2))
        assert first.name == second.name == weights_fingerprint(first).hex()
        assert load_file(first / "model.safetensors").keys() == other.keys()


async def test_one_folder_of_a_host_has_one_path(socket_dir: Path, tmp_path: Path, other: Tensors) -> None:
    engine = {"staged_weights_dir": str(tmp_path / "staged")}
    async with Mesh(socket_dir, engines=2, engine=engine, gateway={"admin_api_key": ("root",)}).running() as mesh:
        path = await send_weights(other, mesh.coordinator.settings.listen)
        assert Path(path).name == weights_fingerprint(Path(path)).hex()
        async with mesh.http(headers={"authorization": "Bearer root"}) as http:
            loaded = await http.post("/reload_weights", params={"path": path})
            assert loaded.status_code == 200, loaded.text


async def test_an_engine_that_takes_none_is_named(socket_dir: Path, tmp_path: Path, other: Tensors) -> None:
    def settings(index: int) -> dict[str, str]:
        return {} if index else {"staged_weights_dir": str(tmp_path / "staged")}

    async with Mesh(socket_dir, engines=2, engine=settings).running() as mesh:
        with pytest.raises(FailedPrecondition, match=r"engine-1: .*start it with --staged-weights-dir"):
            await send_weights(other, mesh.coordinator.settings.listen)


async def test_wrong_tensors_are_named(socket_dir: Path, tmp_path: Path, other: Tensors) -> None:
    engine = {"staged_weights_dir": str(tmp_path / "staged")}
    async with Mesh(socket_dir, engine=engine).running() as mesh:
        coordinator = mesh.coordinator.settings.listen
        with pytest.raises(InvalidArgument, match=r"engine-0: .*lacks model.norm.weight"):
            await send_weights({name: each for name, each in other.items() if name != "model.norm.weight"}, coordinator)
        with pytest.raises(ValueError, match="complex64"):
            await send_weights(other | {"model.norm.weight": torch.zeros(2, dtype=torch.complex64)}, coordinator)


async def test_a_tensor_that_cannot_be_read_is_no_cancellation(
    socket_dir: Path, tmp_path: Path, other: Tensors
) -> None:
    engine = {"staged_weights_dir": str(tmp_path / "staged")}
    name = next(reversed(other))
    async with Mesh(socket_dir, engine=engine).running() as mesh:
        with pytest.raises(NotImplementedError, match="meta"):
            await send_weights(other | {name: other[name].to("meta")}, mesh.coordinator.settings.listen)


async def test_a_coordinator_that_does_not_answer_is_named(socket_dir: Path, other: Tensors) -> None:
    with pytest.raises(Unavailable, match="the coordinator at unix:"):
        await send_weights(other, f"unix:{socket_dir}/nobody")


async def test_an_empty_address_is_the_callers_fault(other: Tensors) -> None:
    with pytest.raises(ValueError, match="coordinator is empty"):
        await send_weights(other, "")
