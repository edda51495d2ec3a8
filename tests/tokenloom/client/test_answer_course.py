"""Which call brings the next part of an answer."""

import pytest

from tokenloom.client import Retries, errors
from tokenloom.client.answer_course import IDEMPOTENCY_KEY, AnswerCourse, NextCall
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import types_pb2

CUT = errors.Unavailable("A service is unavailable; retry.")
FULL = errors.ResourceExhausted("full", retry_after=0.5)
LEAVING = errors.GatewayLeaving("leaving", retry_after=0.0)


def lost() -> errors.TokenloomError:
    error = errors.NotFound("The request is not known.")
    error.reason = "REQUEST_LOST"
    return error


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def course(
    *, may_restart: bool = False, retries: Retries | None = None, request: pb.GenerateRequest | None = None
) -> AnswerCourse:
    request = request or pb.GenerateRequest(text="a", n=2)
    return AnswerCourse(request, retries or Retries(), 60.0, Clock(), may_restart=may_restart)


def response(index: int = 0, first: int = 0, count: int = 1, **more: object) -> pb.GenerateResponse:
    ids = range(first, first + count)
    return pb.GenerateResponse(request_id="r", index=index, token_index=first, token_ids=ids, **more)  # type: ignore[arg-type]


def key_of(call: NextCall) -> str:
    assert isinstance(call.request, pb.GenerateRequest)
    return dict(call.metadata)[IDEMPOTENCY_KEY]


def test_an_answer_is_resumed_where_it_broke_off() -> None:
    answer = course()
    answer.next_call()
    answer.take(response(0, 0, 2, text="ab", text_length=2, prompt_logprobs=types_pb2.Logprobs(sampled=[0.0, -1.0])))
    assert answer.is_first
    answer.take(response(1, 0, 1, text_length=1, finish_reason=types_pb2.FINISH_REASON_STOP))
    answer.take(response(0, 2, 3, text_length=4, prompt_logprobs=types_pb2.Logprobs(sampled=[-2.0])))
    assert not answer.is_first
    assert answer.failed(CUT, was_cut=True) == 0
    call = answer.next_call()
    assert call == NextCall(
        pb.InferenceResumeRequest(
            request=pb.GenerateRequest(text="a", n=2),
            request_id="r",
            positions=[
                pb.OutputPosition(index=0, num_tokens=5, text_length=4, num_prompt_logprobs=3),
                pb.OutputPosition(index=1, num_tokens=1, text_length=1, finished=True),
            ],
        ),
        (),
    )


def test_a_call_that_brought_nothing_is_repeated_with_its_key() -> None:
    answer = course()
    key = key_of(answer.next_call())
    assert answer.failed(CUT, was_cut=True) == 0
    assert key_of(answer.next_call()) == key
    assert key_of(course().next_call()) != key


def test_a_request_that_was_refused_gets_a_new_key() -> None:
    answer = course()
    key = key_of(answer.next_call())
    assert answer.failed(FULL, was_cut=False) >= 0.5
    assert key_of(answer.next_call()) != key


@pytest.mark.parametrize("error", [errors.InvalidArgument("x"), errors.Internal()])
def test_final_errors_are_raised(error: errors.TokenloomError) -> None:
    answer = course()
    answer.next_call()
    with pytest.raises(type(error)):
        answer.failed(error, was_cut=False)


def test_what_the_mesh_ends_is_not_resumed() -> None:
    answer = course()
    answer.next_call()
    answer.take(response())
    with pytest.raises(errors.ResourceExhausted):
        answer.failed(FULL, was_cut=False)


def test_a_whole_answer_may_begin_anew() -> None:
    answer = course(may_restart=True)
    key = key_of(answer.next_call())
    answer.take(response())
    assert answer.failed(FULL, was_cut=False) >= 0.5
    assert key_of(answer.next_call()) != key
    answer.take(response())
    assert answer.is_first


@pytest.mark.parametrize("was_cut", [True, False])
def test_a_gateway_that_leaves_is_no_failure_of_the_mesh(was_cut: bool) -> None:
    """However many streams it had: the budget is for work that is asked for again."""
    retries = Retries(budget=2)
    for _ in range(20):
        answer = course(retries=retries)
        answer.next_call()
        answer.take(response())
        assert answer.failed(CUT if was_cut else LEAVING, was_cut=was_cut) == 0
        assert isinstance(answer.next_call().request, pb.InferenceResumeRequest)


def test_an_answer_that_a_delayed_call_has_taken_is_taken_back() -> None:
    taken = errors.Aborted("The answer continues in another call.")
    answer = course()
    key = key_of(answer.next_call())
    assert answer.failed(taken, was_cut=False) == 0
    assert key_of(answer.next_call()) == key
    answer.take(response(0, 0, 2))
    assert answer.failed(taken, was_cut=False) == 0
    assert isinstance(answer.next_call().request, pb.InferenceResumeRequest)
    with pytest.raises(errors.Aborted):
        answer.failed(taken, was_cut=False)


def test_a_gateway_that_stays_away_is_asked_as_often_as_allowed() -> None:
    answer = course(retries=Retries(max_retries=2, budget=100))
    answer.next_call()
    answer.take(response())
    assert answer.failed(CUT, was_cut=True) == 0
    for least in (2.0,):
        answer.next_call()
        assert answer.failed(CUT, was_cut=True) >= least
    answer.next_call()
    with pytest.raises(errors.Unavailable):
        answer.failed(CUT, was_cut=True)
    answer.take(response(0, 1))
    assert answer.failed(CUT, was_cut=True) == 0, "the answer has come further"


def test_no_retries_at_all() -> None:
    answer = course(retries=Retries(max_retries=0))
    answer.next_call()
    with pytest.raises(errors.Unavailable):
        answer.failed(errors.Cancelled("The request was cancelled."), was_cut=True)


def test_overload_of_the_next_gateway_is_waited_out_without_losing_the_answer() -> None:
    answer = course()
    answer.next_call()
    answer.take(response())
    answer.failed(CUT, was_cut=True)
    answer.next_call()
    assert answer.failed(FULL, was_cut=False) >= 0.5
    assert isinstance(answer.next_call().request, pb.InferenceResumeRequest)


@pytest.mark.parametrize("may_restart", [True, False])
def test_a_lost_request_begins_anew_only_if_nothing_was_delivered(may_restart: bool) -> None:
    answer = course(may_restart=may_restart)
    key = key_of(answer.next_call())
    answer.take(response())
    answer.failed(CUT, was_cut=True)
    answer.next_call()
    if not may_restart:
        with pytest.raises(errors.NotFound):
            answer.failed(lost(), was_cut=False)
        return
    assert answer.failed(lost(), was_cut=False) < 1
    assert key_of(answer.next_call()) != key


def test_an_old_gateway_cannot_resume() -> None:
    answer = course()
    answer.next_call()
    answer.take(response())
    answer.failed(CUT, was_cut=True)
    answer.next_call()
    with pytest.raises(errors.Unavailable):
        answer.failed(errors.Unimplemented("The service does not implement this call."), was_cut=False)


def test_a_beam_search_has_no_key_and_begins_anew() -> None:
    answer = course(may_restart=True, request=pb.GenerateRequest(text="a", beam_search=pb.BeamSearch()))
    assert answer.next_call().metadata == ()
    answer.take(response())
    assert answer.failed(CUT, was_cut=True) == 0
    assert isinstance(answer.next_call().request, pb.GenerateRequest)
