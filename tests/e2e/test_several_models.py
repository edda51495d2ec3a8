"""``tokenloom serve MODEL --also MODEL``: two models behind one address, each with parts of its own."""

import shutil
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Serve
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME

QUESTION: Any = [{"role": "user", "content": "What is 3 plus 4?"}]


def test_the_model_chooses_the_parts(serve: Serve, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    mesh = serve("--also", str(tmp_path / "other"))
    assert mesh.ready_line.startswith(f"{DEMO_MODEL_NAME} and other are served at ")
    parts = {(part["service"], part["model"]): part for part in mesh.ps()}
    assert len(parts) == 9
    assert {part["health"] for part in parts.values()} == {"SERVING"}
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:

        def ask(model: str) -> str:
            answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
            assert answer.model == model
            return str(answer.choices[0].message.content)

        assert [model.id for model in client.models.list()] == [DEMO_MODEL_NAME, "other"]
        assert (ask(DEMO_MODEL_NAME), ask("other")) == ("3 + 4 = 7.", "3 + 4 = 7.")
        with pytest.raises(openai.NotFoundError):
            ask("third")
    assert mesh.stop(signal.SIGTERM) == 0
