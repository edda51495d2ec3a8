"""guidance: its model for vLLM, which sends each grammar under the old name too: a choice, an expression, a schema."""

import os
from typing import Literal

from guidance import assistant, json, regex, select, user
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What the model is made to fill in; open, it would be filled for ever by so small a model."""

    model_config = ConfigDict(extra="forbid")
    topic: Literal["memory", "time"]
    sure: bool


def main() -> None:
    model = VLLMModel(
        os.environ["TOKENLOOM_MODEL"], base_url=os.environ["TOKENLOOM_URL"] + "/v1", api_key="none", echo=False
    )
    made = {}
    for name, grammar in {
        "choice": select(["a block", "a page"], name="choice"),
        "number": regex("[0-9]{2}", name="number"),
        "answer": json(name="answer", schema=Answer),
    }.items():
        with user():
            asked = model + "What is a KV block?"
        with assistant():
            made[name] = (asked + grammar)[name]
    assert made["choice"] in ("a block", "a page")
    assert int(made["number"]) < 100
    Answer.model_validate_json(made["answer"])
    print("a choice, a regular expression and a schema")


main()
