"""A batch whose lines ask for embeddings."""

from pathlib import Path
from typing import Any

from tests.services.gateway.batches.test_batches_api import create, ended, results, upload
from tests.services.gateway.fakes import FakeMesh, FakeRequest
from tokenloom.v1 import types_pb2

EMBEDDINGS = "/v1/embeddings"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": body}


def pool(request: FakeRequest) -> None:
    """Answer with the length of the prompt and its first token."""
    ids = request.submit.prompt.token_ids
    request.pool([float(len(ids)), float(ids[0])])
    request.finish()


async def test_lines_get_the_vectors_that_requests_of_their_own_get(socket_dir: Path, tmp_path: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = types_pb2.ModelLimits(
        max_model_len=512, vocab_size=256, pooling_tasks=[types_pb2.POOLING_TASK_EMBED], matryoshka=True
    )
    mesh.outputs.pool = pool
    good: dict[str, dict[str, Any]] = {
        "text": {"input": "a cat"},
        "texts": {"input": ["a cat", "two dogs"], "encoding_format": "float"},
        "ids": {"input": [[7, 8], [9]], "encoding_format": "base64"},
    }
    lines = [line(name, **body) for name, body in good.items()]
    lines += [line("no-input"), line("no-such-dimensions", input="a cat", dimensions=0)]
    async with mesh.gateway(batch_dir=tmp_path / "batches"), mesh.http() as http:
        batch = await ended(http, await create(http, await upload(http, *lines), endpoint=EMBEDDINGS))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
        answers = await results(http, batch["output_file_id"])
        for name, body in good.items():
            alone = (await http.post(EMBEDDINGS, json=body)).json()
            answer = answers[name]["response"]["body"]
            assert (answer["data"], answer["usage"]) == (alone["data"], alone["usage"])
        assert answers["ids"]["response"]["body"]["usage"]["prompt_tokens"] == 3
        failures = await results(http, batch["error_file_id"])
        wrong = {name: each["response"]["body"]["error"]["param"] for name, each in failures.items()}
        assert wrong == {"no-input": "input", "no-such-dimensions": "dimensions"}
