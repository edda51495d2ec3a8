"""The example of a web application streams texts, refuses what is wrong, and ends the requests of clients that go."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import LLM, AsyncLLM, EngineArgs, SamplingParams
from tokenloom.offline.llm_engine import LLMEngine

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.web_app import WebApp, serve

PARAMS = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    made = AsyncLLM(EngineArgs("tokenloom-demo", worker="hash", max_model_len=2048, hash_step_seconds=0.002))
    yield made
    made.close()


async def ask(port: int, target: str) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


async def test_texts_of_several_clients_and_wrong_requests(engine: AsyncLLM) -> None:
    server = await serve(engine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    targets = ["/?prompt=Once", "/?prompt=upon%20a", "/?other=1", "/?prompt=" + "a%20" * 4000]
    once, upon, other, long = await asyncio.gather(*(ask(port, target) for target in targets))
    server.close()
    llm = LLM("tokenloom-demo", worker="hash", max_model_len=2048)
    texts = [output.outputs[0].text for output in llm.generate(["Once", "upon a"], PARAMS, use_tqdm=False)]
    llm.close()
    assert [once, upon] == [("HTTP/1.1 200 OK", text) for text in texts]
    assert other == ("HTTP/1.1 400 Bad Request", "GET /?prompt=TEXT\n")
    assert long[0] == "HTTP/1.1 400 Bad Request"
    assert "maximum context length" in long[1]


async def test_a_client_that_goes_away_ends_its_request(engine: AsyncLLM) -> None:
    server = await asyncio.start_server(WebApp(engine, max_tokens=2000).answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /?prompt=Once HTTP/1.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert await engine._call(LLMEngine.get_num_unfinished_requests) == 1
    writer.close()
    while await engine._call(LLMEngine.get_num_unfinished_requests):
        pass
    server.close()
