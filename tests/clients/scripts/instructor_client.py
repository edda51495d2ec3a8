"""instructor: objects by a JSON schema, by a tool, and as they grow."""

import asyncio
import os
from typing import Annotated, Literal

import instructor
import openai
from pydantic import UUID4, BaseModel, Field, FilePath

URL, MODEL = os.environ["TOKENLOOM_URL"] + "/v1", os.environ["TOKENLOOM_MODEL"]
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


_VERSION_4 = "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"


class Record(BaseModel):
    """Types whose schemas have formats and keywords that no grammar enforces."""

    id: Annotated[UUID4, Field(json_schema_extra={"pattern": _VERSION_4})]
    tags: set[Annotated[str, Field(max_length=5)]] = Field(min_length=1, max_length=2)
    content: Annotated[bytes, Field(max_length=5)]
    source: Annotated[FilePath, Field(json_schema_extra={"enum": [__file__]})]


def main() -> None:
    plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(plain, mode=mode)
        answer, raw = client.chat.completions.create_with_completion(response_model=Answer, **ASKING)
        assert isinstance(answer, Answer), mode
        assert raw.usage.completion_tokens > 0
        *_, last = client.chat.completions.create_partial(response_model=Answer, **ASKING)
        # Complete, but maybe another answer: with some releases of pydantic its tool has another name and description.
        Answer.model_validate(last.model_dump())
        record = client.chat.completions.create(response_model=Record, **ASKING)
        assert isinstance(record, Record), mode
    named = instructor.from_provider(f"openai/{MODEL}", base_url=URL, api_key="none", mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(named.chat.completions.create(response_model=Answer, **ASKING), Answer)
    assert all(isinstance(answer, Answer) for answer in asyncio.run(at_once()))
    kinds = "objects, partial objects, UUID4, set, bytes, FilePath"
    print(f"JSON_SCHEMA and TOOLS: {kinds}; from_provider; asyncio, 4 at a time")


async def at_once() -> list[object]:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
    asking = [client.chat.completions.create(response_model=Answer, **ASKING) for _ in range(4)]
    return list(await asyncio.gather(*asking))


if __name__ == "__main__":
    main()
