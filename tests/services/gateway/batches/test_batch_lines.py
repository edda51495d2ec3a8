"""Lines of a batch's input and of its results."""

import io
import json

import pytest

from tokenloom.services.gateway.batches.batch_lines import (
    InputLines,
    LineError,
    LineRequest,
    answer_line,
    error_line,
    expiry_of,
    results_in,
)

URL = "/v1/completions"


def line(custom_id: str, padding: int = 0) -> bytes:
    return json.dumps({"custom_id": custom_id, "url": URL, "body": {"prompt": "x" * padding}}).encode() + b"\n"


def test_requests_are_taken_in_pieces() -> None:
    data = b"".join(line(str(number), 1000) for number in range(100))
    lines = InputLines(io.BytesIO(data), URL, 4096)
    sizes = []
    numbers = []
    while taken := lines.take(10_000):
        sizes.append(sum(len(each.body) for each in taken if isinstance(each, LineRequest)))
        numbers += [each.number for each in taken]
    assert numbers == list(range(1, 101))
    assert max(sizes) < 12_000


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_skipped_without_being_held(end: bytes) -> None:
    class Watched(io.BytesIO):
        largest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            read = super().readline(size)
            self.largest = max(self.largest, len(read))
            return read

    file = Watched(line("a") + b"x" * 100_000 + b"\n" + line("b").rstrip() + end)
    first, long, last = InputLines(file, URL, 200).take(1 << 20)
    assert isinstance(first, LineRequest)
    assert (isinstance(long, LineError) and long.code, long.number) == ("line_too_long", 2)
    assert isinstance(last, LineRequest)
    assert last.number == 3
    assert file.largest <= 201


def test_a_line_as_long_as_may_be() -> None:
    exact = line("a").rstrip()
    for end in (b"", b"\n"):
        (taken,) = InputLines(io.BytesIO(exact + end), URL, len(exact)).take(1)
        assert isinstance(taken, LineRequest)
        (taken,) = InputLines(io.BytesIO(exact + end), URL, len(exact) - 1).take(1)
        assert isinstance(taken, LineError)


@pytest.mark.parametrize(
    "body", [b'{"stream":"\xff"}', b'{"background":{"a":"\xff"}}', b'"\xff"', b'{"stream":"\\ud800"}', b"[" * 100_000]
)
def test_a_line_with_a_wrong_body_is_wrong_alone(body: bytes) -> None:
    wrong = b'{"custom_id":"w","url":"/v1/completions","body":%b}\n' % body
    first, second, third = InputLines(io.BytesIO(line("a") + wrong + line("b")), URL, 1 << 20).take(1 << 20)
    assert isinstance(first, LineRequest)
    assert isinstance(second, LineError)
    assert isinstance(third, LineRequest)
    json.loads(error_line("batch_1", second))


def test_counting_stops_early() -> None:
    assert InputLines(io.BytesIO(line("a") + b"\n\n" + line("b")), URL, 200).count(5) == 2
    for data in (b"x\n" * 100, b"\n" * 100):
        lines = InputLines(io.BytesIO(data), URL, 200)
        assert lines.count(5) > 5
        assert lines.number <= 11


def test_results_say_which_line_they_answer() -> None:
    body = b'{"text":"a\\nb"}'
    answer = answer_line("batch_1", LineRequest(7, "seven", b"{}"), 200, "r", body)
    error = error_line("batch_1", LineError(8, "eight", "code", "message"))
    read = json.loads(answer)
    assert (read["custom_id"], read["response"]["body"], read["error"]) == ("seven", {"text": "a\nb"}, None)
    assert json.loads(error)["error"] == {"code": "code", "message": "message"}
    expired = error_line("batch_1", expiry_of(LineRequest(9, error.decode(), body)))
    looks_expired = answer_line("batch_1", LineRequest(10, expired.decode(), b"{}"), 400, "r", error.rstrip())
    for rest in (b"", b'{"id":"batch_req_0000000009', b"\0" * 50, answer[:-1], b"{}\n"):
        file = io.BytesIO(answer + error + expired + looks_expired + rest)
        assert list(results_in(file)) == [(7, False), (8, False), (9, True), (10, False)]
        assert file.tell() == len(answer + error + expired + looks_expired)
