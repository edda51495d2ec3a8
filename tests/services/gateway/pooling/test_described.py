"""The answers of a model that pools are as the OpenAPI document describes them."""

from typing import Any

import jsonschema
import pytest

from tests.services.gateway.fakes import FakeMesh

PAIR = {"text_1": "a", "text_2": ["b", "c"]}
RANKED = {"query": "a", "documents": ["b", "c"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/score", PAIR),
        ("/v1/score", PAIR),
        ("/rerank", RANKED),
        ("/v1/rerank", RANKED),
        ("/v2/rerank", RANKED),
    ],
)
async def test_answers_are_as_described(mesh: FakeMesh, path: str, body: dict[str, Any]) -> None:
    async with mesh.http() as http:
        api = (await http.get("/openapi.json")).json()
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    schema = api["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**schema, "components": api["components"]})
