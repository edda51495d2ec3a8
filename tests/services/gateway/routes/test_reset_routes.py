"""Operators reset the caches of encoders, and those of engines, under vLLM's names."""

from pathlib import Path

from tests.services.gateway.fake_encoders import with_encoders
from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.mesh.fake_engines import ADMIN, KEYS, with_engines
from tokenloom.request import errors


async def test_all_encoders_reset_their_caches(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with (
        with_engines(mesh, "engine-0") as engines,
        with_encoders(mesh, 2) as encoders,
        mesh.gateway(**KEYS),
        mesh.http() as http,
    ):
        names = ["encoder-0", "encoder-1"]
        assert (await http.post("/reset_mm_cache")).status_code == 401
        response = await http.post("/reset_mm_cache", headers=ADMIN)
        assert response.json() == {"status": "reset", "engines": [], "encoders": names}
        response = await http.post("/reset_encoder_cache", headers=ADMIN)
        assert response.json() == {"status": "reset", "engines": ["engine-0"], "encoders": names}
        assert [[each.files for each in encoder.resets] for encoder in encoders] == [[True, False]] * 2
        assert engines["engine-0"].num_resets == 1

        encoders[1].error = errors.Internal("a bug")
        response = await http.post("/reset_mm_cache", headers=ADMIN)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "encoder-1: a bug")
        assert len(encoders[0].resets) == 3, "all are asked, whatever one answers"
        assert (await http.post("/reset_mm_cache?files=1", headers=ADMIN)).status_code == 400
