"""Lines of a batch file."""

import json

import pytest

from tokenloom.cli.batch.batch_request import BadRequest, BatchRequest, read_request

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


def test_a_request() -> None:
    assert read_request(1, json.dumps(GOOD)) == BatchRequest("a", "/v1/completions", {"prompt": "Hi"})


@pytest.mark.parametrize(
    ("change", "custom_id", "message"),
    [
        ({"custom_id": None}, "line-3", "custom_id must be"),
        ({"method": "GET"}, "a", "method must be POST"),
        ({"url": "http://elsewhere/v1/completions"}, "a", "url must be a path"),
        ({"body": []}, "a", "body must be an object"),
        ({"body": {"stream": True}}, "a", "stream must not be set"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(change: dict[str, object], custom_id: str, message: str) -> None:
    with pytest.raises(BadRequest, match=f"line 3.*{message}|{message}") as caught:
        read_request(3, json.dumps(GOOD | change))
    assert caught.value.custom_id == custom_id


@pytest.mark.parametrize("line", ["{", "[]"])
def test_what_is_no_object(line: str) -> None:
    with pytest.raises(BadRequest):
        read_request(3, line)
