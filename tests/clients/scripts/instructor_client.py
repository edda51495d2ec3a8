"""instructor: objects by a JSON schema, by a tool, and as they grow."""

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

MODEL = os.environ["TOKENLOOM_MODEL"]
ASKING = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is a KV block?"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}


class Answer(BaseModel):
    """What the model is made to fill in."""

    topic: Literal["memory", "time"]
    sure: bool


def main() -> None:
    plain = openai.OpenAI(base_url=os.environ["TOKENLOOM_URL"] + "/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(plain, mode=mode)
        answer = client.chat.completions.create(response_model=Answer, **ASKING)
        assert isinstance(answer, Answer), mode
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(response_model=Answer, **ASKING)
    assert last.topic is not None
    print("JSON_SCHEMA, TOOLS, partial objects")


if __name__ == "__main__":
    main()
