"""Runs requests with reasoning through a whole core: what is free, what is forced, and what follows a grammar."""

import re
from collections.abc import Sequence

import pytest

from tests.engine_core.helpers import finish, make_core
from tests.engine_core.invariants import check_idle
from tests.engine_core.structured_output.helpers import (
    EOS,
    VOCAB_SIZE,
    decode,
    make_client,
    make_request,
    run,
    token_ids_of,
)
from tokenloom.engine_core.data.config import ReasoningConfig
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request.reasoning import ReasoningMarks

DATE = StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])")
START, END = 2001, (2002, 2003, 2004)
REASONING = ReasoningConfig(marks=ReasoningMarks((START,), END, begins_inside=False))


def check(request: EngineCoreRequest, output: Sequence[int]) -> None:
    """The reasoning is what a free request draws, up to its budget; then the mark, then a date."""
    params = request.sampling_params
    assert params.thinking_token_budget is not None
    budget = params.thinking_token_budget
    free = expected_tokens(request.prompt_token_ids, budget, VOCAB_SIZE)
    assert list(output[:budget]) == free
    assert tuple(output[budget : budget + len(END)]) == END
    answer = output[budget + len(END) :]
    if params.structured_output is not None:
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", decode(answer[:-1]))
        assert answer[-1] == EOS


def requests() -> list[EngineCoreRequest]:
    """Requests with open reasoning and prompts of several chunks; every other one has a grammar."""
    return [
        make_request(
            f"r{n}",
            DATE if n % 2 else None,
            prompt=[START, *range(1 + n, 12 + 2 * n)],
            max_tokens=40,
            stop=(EOS,) if n % 2 else (),
            budget=n,
        )
        for n in range(10)
    ]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [512, 40], ids=["roomy", "crowded"])
def test_a_budget_closes_the_reasoning_and_a_grammar_follows(num_blocks: int, async_scheduling: bool) -> None:
    client = make_client(
        num_blocks=num_blocks, max_num_batched_tokens=32, async_scheduling=async_scheduling, reasoning=REASONING
    )
    outputs = run(client, requests())
    for request in requests():
        check(request, token_ids_of(outputs[request.request_id]))
    assert (client._core.scheduler.stats().num_preemptions > 0) == (num_blocks == 40)
    check_idle(client._core.scheduler)
    client.close()


def test_a_later_attempt_continues_where_the_earlier_one_was() -> None:
    """As after a hand-over from a prefill engine: only prompt and tokens go from engine to engine."""
    client = make_client(reasoning=REASONING)
    for request in requests()[3:6]:
        whole = token_ids_of(run(client, [request])[request.request_id])
        for cut in range(len(whole)):
            again = EngineCoreRequest(
                "again", request.prompt_token_ids, request.sampling_params, accepted_token_ids=whole[:cut]
            )
            assert token_ids_of(run(client, [again])["again"]) == whole[cut:]
    client.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_the_models_own_end_mark_begins_the_answer(async_scheduling: bool) -> None:
    prompt = [START, 5, 6, 7]
    free = expected_tokens(prompt, 6, VOCAB_SIZE)
    marks = ReasoningMarks((START,), (free[3], free[4]), begins_inside=False)
    client = make_client(reasoning=ReasoningConfig(marks=marks), async_scheduling=async_scheduling)
    for budget in (None, 3, 100):
        output = token_ids_of(run(client, [make_request("a", DATE, prompt=prompt, budget=budget)])["a"])
        assert output[:5] == free[:5]
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", decode(output[5:-1]))
    client.close()


def test_a_constraint_may_cover_the_reasoning() -> None:
    marks = REASONING.marks
    client = make_client(reasoning=ReasoningConfig(marks=marks, enable_in_reasoning=True))
    output = token_ids_of(run(client, [make_request("a", DATE, prompt=[START, 5])])["a"])
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", decode(output[:-1]))
    limited = make_request("b", None, prompt=[START, 5], budget=2, max_tokens=6, stop=())
    assert tuple(token_ids_of(run(client, [limited])["b"])[2:5]) == END
    client.close()


def test_a_request_that_ends_while_it_reasons_leaves_nothing() -> None:
    client = make_client(reasoning=REASONING)
    outputs = run(client, [make_request("a", DATE, prompt=[START], max_tokens=4, budget=100)])["a"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    client.add_request(make_request("b", None, prompt=[START], budget=100))
    client.get_output()
    client.abort_requests(["b"])
    check_idle(client._core.scheduler)
    assert client._core._grammars is not None
    assert not client._core._grammars.live
    client.close()


def test_an_engine_that_does_not_know_the_marks_refuses_a_budget() -> None:
    client = make_client()
    (output,) = run(client, [make_request("a", None, budget=3)])["a"]
    assert output.error == "thinking_token_budget: this engine does not know the tokens that end the model's reasoning"
    client.close()
    core = make_core()
    core.add_request(make_request("a", None, budget=3))
    (output,) = finish(core)["a"]
    assert output.finish_reason is FinishReason.ERROR


def test_marks_that_the_model_cannot_draw_are_refused_at_start() -> None:
    marks = ReasoningMarks((1,), (VOCAB_SIZE,), begins_inside=True)
    with pytest.raises(ValueError, match=r"reasoning_parser: .* below 2048"):
        make_client(reasoning=ReasoningConfig(marks=marks))
