import pytest

from tests.engine_core.helpers import make_request
from tokenloom.engine_core.data.request import FINISH_REASONS, Request, RequestStatus, finish_status

FINISHED = [status for status in RequestStatus if status >= RequestStatus.FINISHED_STOPPED]


def request_of(prompt: list[int], max_tokens: int = 3, max_model_len: int = 100, **kwargs: object) -> Request:
    return Request(make_request("r", prompt, max_tokens, **kwargs), max_model_len, arrival_ns=0)  # type: ignore[arg-type]


def test_accepted_tokens_are_output() -> None:
    request = request_of([1, 2], accepted=[8, 9])
    assert request.num_tokens == 4
    assert request.num_output_tokens == 2
    assert request.all_token_ids == [1, 2, 8, 9]
    assert request.prompt_token_ids == [1, 2]


def test_appending_leaves_the_message_alone() -> None:
    message = make_request("r", [1], accepted=[2])
    request = Request(message, 100, 0)
    request.append_token(3)
    assert request.all_token_ids == [1, 2, 3]
    assert (message.prompt_token_ids, message.accepted_token_ids) == ([1], [2])


@pytest.mark.parametrize(
    ("prompt", "accepted", "stop", "max_model_len", "expected"),
    [
        ([5], [], (), 100, None),
        ([5], [], (5,), 100, None),  # a stop token in the prompt ends nothing
        ([5], [6, 7], (), 100, None),
        ([5], [6, 7], (7,), 100, RequestStatus.FINISHED_STOPPED),
        ([5], [6, 7, 8], (), 100, RequestStatus.FINISHED_LENGTH_CAPPED),
        ([5], [6, 7, 8], (8,), 100, RequestStatus.FINISHED_STOPPED),  # a stop token wins over a limit
        ([5], [6], (), 2, RequestStatus.FINISHED_LENGTH_CAPPED),
    ],
)
def test_finish_status(
    prompt: list[int], accepted: list[int], stop: tuple[int, ...], max_model_len: int, expected: RequestStatus | None
) -> None:
    assert finish_status(request_of(prompt, max_model_len=max_model_len, accepted=accepted, stop=stop)) is expected


@pytest.mark.parametrize("status", FINISHED)
def test_finished_is_final(status: RequestStatus) -> None:
    request = request_of([1])
    request.set_status(status)
    assert request.is_finished
    for other in RequestStatus:
        with pytest.raises(AssertionError, match="cannot become"):
            request.set_status(other)


def test_only_the_running_are_preempted() -> None:
    request = request_of([1])
    with pytest.raises(AssertionError, match="r: WAITING cannot become PREEMPTED"):
        request.set_status(RequestStatus.PREEMPTED)
    request.set_status(RequestStatus.RUNNING)
    request.set_status(RequestStatus.PREEMPTED)
    assert not request.is_finished
    request.set_status(RequestStatus.RUNNING)


def test_every_end_has_a_reason() -> None:
    assert sorted(FINISH_REASONS) == FINISHED
