"""``tokenloom serve model.gguf``: one file is a whole model."""

from pathlib import Path

import openai

from tests.e2e.conftest import Serve
from tests.tokenloom.gguf.demo_file import write_demo_file


def test_a_file_is_served(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "small-demo.gguf"
    write_demo_file(path)
    mesh = serve(str(path))
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["small-demo"]
        answer = client.chat.completions.create(
            model="small-demo", messages=[{"role": "user", "content": "What is prefill?"}], temperature=0
        )
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.choices[0].message.content or "").startswith("Prefill is the first step of a request")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        constrained = client.completions.create(
            model="small-demo", prompt="Once", max_tokens=40, extra_body={"structured_outputs": {"json": schema}}
        )
        assert constrained.choices[0].text.lstrip().startswith("{")
