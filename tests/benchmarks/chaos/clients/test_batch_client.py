"""A batch outlives the loss of its gateway, and its client waits for it."""

import json

import pytest

from benchmarks.chaos.clients.answer import Progress
from benchmarks.chaos.clients.batch_client import BatchClient
from benchmarks.chaos.clients.exchange import Exchange
from benchmarks.chaos.clients.failure import RequestFailed
from benchmarks.chaos.clients.mix import Case
from tests.benchmarks.chaos.clients.fake_server import answering
from tests.benchmarks.chaos.clients.test_openai_clients import unary

LOST = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
"""The gateway ends in the middle of an answer."""
GONE = unary("404 Not Found", b'{"error": {"code": "not_found", "message": "no file"}}')


def found(**fields: object) -> bytes:
    return unary("200 OK", json.dumps(fields).encode())


def batch(status: str, **fields: object) -> bytes:
    return found(id="batch_1", status=status, output_file_id="file-2", error_file_id=None, **fields)


def exchange() -> Exchange:
    case = Case("batch file", call="POST /v1/batches", options={"lines": [{"prompt": "a"}, {"prompt": "b"}]})
    return Exchange(5, case, 0, Progress(0.0), 10.0)


async def test_it_calls_again_until_the_results_are_there() -> None:
    lines = [{"custom_id": str(number), "id": f"r{number}", "response": {"request_id": "x"}} for number in (1, 0)]
    results = unary("200 OK", "\n".join(map(json.dumps, lines)).encode())
    sent, requests = exchange(), list[str]()
    script = [LOST, found(id="file-1"), batch("validating"), LOST, batch("completed"), LOST, results, LOST, GONE, GONE]
    async with answering(script, requests) as address:
        await BatchClient([address], "m").send(sent)
    assert json.loads(sent.answer.samples[0].text) == [{"custom_id": str(number), "response": {}} for number in (0, 1)]
    assert sent.resumed == 4
    assert [head.split(" HTTP")[0] for head in requests][-2:] == ["DELETE /v1/files/file-1", "DELETE /v1/files/file-2"]


async def test_a_batch_that_fails_is_a_failed_request() -> None:
    async with answering([found(id="file-1"), batch("failed")], []) as address:
        with pytest.raises(RequestFailed, match="batch failed"):
            await BatchClient([address], "m").send(exchange())
