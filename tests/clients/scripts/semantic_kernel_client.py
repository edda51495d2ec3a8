"""semantic-kernel: a task with a plugin, whose turns it sends back with empty lists of parts."""

import asyncio
import os

import task
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather:
    @kernel_function(name=task.NAME, description="Says the weather of a city.")
    def get_weather(self, city: str) -> str:
        return task.get_weather(city)


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["SCRIPTED_URL"] + "/v1", api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=os.environ["SCRIPTED_MODEL"], async_client=client)
    kernel = Kernel()
    kernel.add_service(service)
    kernel.add_plugin(Weather(), "weather")
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    history = ChatHistory()
    history.add_user_message(task.QUESTION)
    answer = await service.get_chat_message_content(history, settings, kernel=kernel)
    task.check(str(answer))
    assert [message.role.value for message in history.messages] == ["user", "assistant", "tool"]
    history.add_message(answer)
    history.add_user_message(task.QUESTION)
    pieces = service.get_streaming_chat_message_content(history, settings, kernel=kernel)
    task.check("".join([str(piece) async for piece in pieces if piece is not None]))
    print("a task with a plugin to its end, whole and streamed")


if __name__ == "__main__":
    asyncio.run(main())
