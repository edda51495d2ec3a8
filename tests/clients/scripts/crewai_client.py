"""crewai: a crew that finishes a task with a tool, its error of a context that is too long, errors.

By that error it summarises what it has so far, and goes on.
"""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
import faults
import openai
import task
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from crewai.utilities.exceptions.context_window_exceeding_exception import LLMContextLengthExceededError

get_weather = tool(task.NAME)(task.get_weather)


def model(url: str, name: str, **options: object) -> LLM:
    return LLM(model=name, provider="openai", base_url=url + "/v1", api_key="none", max_retries=0, **options)


def finish(*, is_streamed: bool) -> None:
    llm = model(os.environ["SCRIPTED_URL"], os.environ["SCRIPTED_MODEL"], stream=is_streamed)
    reporter = Agent(role="reporter", goal="report the weather", backstory="", llm=llm, tools=[get_weather])
    asked = Task(description=task.QUESTION, expected_output="a sentence", agent=reporter)
    task.check(str(Crew(agents=[reporter], tasks=[asked]).kickoff()))


def ask(fault: faults.Fault) -> object:
    return model(fault.url, fault.model_name, timeout=fault.timeout, temperature=fault.temperature).call(fault.text)


def main() -> None:
    finish(is_streamed=False)
    finish(is_streamed=True)
    said = faults.recognised(
        ask,
        {
            faults.TOO_LONG: LLMContextLengthExceededError,
            faults.UNKNOWN_MODEL: lambda error: "not found" in str(error),
            faults.BAD_FIELD: openai.BadRequestError,
            faults.RATE_LIMIT: openai.RateLimitError,
            faults.NOT_SERVED: openai.InternalServerError,
            faults.TIMEOUT: lambda error: isinstance(error.__cause__, openai.APITimeoutError),
        },
    )
    print(f"a crew finishes a task with a tool, whole and streamed; {said}")


if __name__ == "__main__":
    main()
