"""inspect-ai: an evaluation of a task with a tool, a sample that outgrows the context, errors.

Where a context is too long, the sample ends with ``model_length`` instead of an error, and is scored.
"""

import asyncio
import os
from pathlib import Path

import anthropic
import faults
import openai
import task
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from tenacity import RetryError

PROVIDERS = {
    "openai-api/tokenloom": ("/v1", openai),
    "vllm": ("/v1", openai),
    "anthropic": ("", anthropic),
}
"""The path below which each asks, and the SDK with which it does."""


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Say the weather of a city.

        Args:
            city: Its name.
        """
        return task.get_weather(city)

    return execute


def model(provider: str, url: str, name: str, **options: object) -> Model:
    config = GenerateConfig(max_retries=0, **{"max_tokens": 64, **options})
    path, _ = PROVIDERS[provider]
    return get_model(f"{provider}/{name}", base_url=url + path, api_key="none", config=config, memoize=False)


def finish(provider: str) -> None:
    samples = [Sample(input=task.QUESTION, target=task.RESULT, id=number) for number in range(2)]
    ours = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
    (log,) = eval(
        ours,
        model(provider, os.environ["SCRIPTED_URL"], os.environ["SCRIPTED_MODEL"]),
        log_dir=str(Path.cwd()),
        display="none",
    )
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1, log.samples[0].output


def outgrow(provider: str) -> None:
    """The evaluation goes on: the sample is scored, and its output says why it ended."""
    ours = Task(dataset=[Sample(input=faults.TOO_LONG.text, target="x")], solver=generate(), scorer=includes())
    (log,) = eval(
        ours,
        model(provider, os.environ["TOKENLOOM_URL"], os.environ["TOKENLOOM_MODEL"]),
        log_dir=str(Path.cwd()),
        display="none",
    )
    assert log.status == "success", log.error
    assert log.samples[0].output.stop_reason == "model_length", log.samples[0].output


class ModelLengthError(Exception):
    """Stands for an output whose reason is ``model_length``."""


def fail(provider: str) -> str:
    def ask(fault: faults.Fault) -> object:
        options = {"temperature": fault.temperature, "attempt_timeout": int(fault.timeout)}
        asked = model(provider, fault.url, fault.model_name, **options)
        try:
            output = asyncio.run(asked.generate(fault.text))
        except RetryError as error:  # it takes what failed for worth another try, of which it has none
            raise error.last_attempt.exception() from None
        if output.stop_reason == "model_length":
            raise ModelLengthError
        return output

    sdk = PROVIDERS[provider][1]
    expected: dict[faults.Fault, faults.Expected] = {
        faults.TOO_LONG: ModelLengthError,
        faults.UNKNOWN_MODEL: sdk.NotFoundError,
        faults.BAD_FIELD: lambda error: getattr(error, "status_code", None) == 400,
        faults.RATE_LIMIT: sdk.RateLimitError,
        faults.NOT_SERVED: sdk.InternalServerError,
        faults.TIMEOUT: lambda error: type(error).__name__ == "AttemptTimeoutError",
    }
    if sdk is anthropic:  # it sends no temperature there
        del expected[faults.BAD_FIELD]
    return faults.recognised(ask, expected)


def main() -> None:
    for provider in PROVIDERS:
        finish(provider)
        outgrow(provider)
    said = sorted({fail(provider) for provider in PROVIDERS})
    print(f"openai-api/, vllm/, anthropic/: evaluations with a tool, a sample that is too long; {', '.join(said)}")


if __name__ == "__main__":
    main()
