"""A checkpoint of sentence-transformers, served and asked as a user does."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.conftest import Serve
from tests.parity.embeddings.layouts import LAYOUTS, TEXTS
from tests.parity.embeddings.record import VECTORS
from tokenloom.client import Client

RECORDED = json.loads(VECTORS.read_text())


@pytest.mark.parametrize("name", ["embeddinggemma", "instructed"])
def test_vectors_by_the_names_of_prompts(name: str, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir()
    LAYOUTS[name].save(path)
    mesh = serve(str(path), "--dtype", "float32")
    recorded: dict[str, Any] = RECORDED[name]["vectors"]
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        for prompt_name, vectors in recorded.items():
            extra = {"normalize": True} | ({"prompt_name": prompt_name} if prompt_name else {})
            answer = client.embeddings.create(model=name, input=list(TEXTS), extra_body=extra)
            np.testing.assert_allclose([item.embedding for item in answer.data], vectors, rtol=0, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="prompt_name is 'other'; the model's prompts are: "):
            client.embeddings.create(model=name, input="a cat", extra_body={"prompt_name": "other"})
        with pytest.raises(openai.BadRequestError, match="prompt_name is for texts"):
            client.embeddings.create(model=name, input=[[5, 6]], extra_body={"prompt_name": "query"})
    with Client(next(part["address"] for part in mesh.ps() if part["service"] == "gateway")) as grpc_client:
        found = grpc_client.embed(list(TEXTS), prompt_name="query", normalize=True).arrays
    np.testing.assert_allclose(found, recorded["query"], rtol=0, atol=1e-5)
    assert mesh.stop(signal.SIGTERM) == 0
