"""Runs requests with a grammar through a whole core; the hash worker draws any allowed token."""

import json
import re

import jsonschema
import pytest

from tests.engine_core.helpers import finish, make_core
from tests.engine_core.invariants import check_idle
from tests.engine_core.structured_output.helpers import (
    EOS,
    PERSON,
    encode,
    json_schema,
    make_client,
    make_request,
    run,
    text_of,
)
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import ErrorKind, FinishReason
from tokenloom.engine_core.data.request import RequestStatus
from tokenloom.engine_core.structured_output.compiler import NUM_COMPILERS, CompileQueue, CompilerKiller
from tokenloom.engine_core.structured_output.compiler_process import CompilerProcess, CompilerUnavailable
from tokenloom.engine_core.structured_output.manager import FAILED, StructuredOutputManager
from tokenloom.engine_core.structured_output.request_constraint import RequestConstraint

DATE = StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])")
BOMB = json_schema({"type": "integer", "multipleOf": 99_999_989})


def test_outputs_follow_their_grammars_beside_others_that_have_none(client: InprocClient) -> None:
    requests = [
        make_request(f"{kind}{n}", constraint, prompt=[n + 1, 5], max_tokens=300)
        for n in range(6)
        for kind, constraint in (("json", json_schema(PERSON)), ("date", DATE), ("free", None))
    ]
    for name, outputs in run(client, requests).items():
        last, text = outputs[-1], text_of(outputs)
        if name.startswith("free"):
            continue
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, EOS)
        if name.startswith("json"):
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert text[:2] == "20"
            assert 1 <= int(text[5:]) <= 12
    check_idle(client._core.scheduler)


def test_a_request_waits_for_its_grammar_without_delaying_others(client: InprocClient) -> None:
    scheduler = client._core.scheduler
    client.add_request(make_request("slow", StructuredOutput(GrammarKind.REGEX, "slow|er")))
    client.add_request(make_request("free", None, max_tokens=1))
    assert scheduler.requests["slow"].status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert scheduler.stats().num_waiting == 2
    assert [output.request_id for output in client.get_output().outputs] == ["free"]
    while "slow" in scheduler.requests:
        client.get_output()
    check_idle(scheduler)


def test_an_abort_while_compiling_leaves_nothing(client: InprocClient) -> None:
    scheduler = client._core.scheduler
    client.add_request(make_request("a", StructuredOutput(GrammarKind.REGEX, "not seen before")))
    client.abort_requests(["a"])
    check_idle(scheduler)
    assert not client._core.is_compiling()
    assert run(client, [make_request("b", DATE)])["b"]


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (StructuredOutput(GrammarKind.REGEX, "(a"), "unclosed group"),
        (BOMB, r"too much memory|more than 2 s"),
    ],
)
def test_a_constraint_that_does_not_compile_is_the_requests_fault(
    client: InprocClient, constraint: StructuredOutput, words: str
) -> None:
    outputs = run(client, [make_request("bad", constraint), make_request("good", DATE)])
    (refused,) = outputs["bad"]
    assert (refused.finish_reason, refused.error_field) == (FinishReason.ERROR, "structured_outputs")
    assert refused.error.startswith("structured_outputs: ")
    assert re.search(words, refused.error)
    assert outputs["good"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(CompilerUnavailable("no process"), ErrorKind.LEAVING), (CompilerKiller("3 ended"), ErrorKind.INTERNAL)],
)
def test_a_constraint_that_was_not_judged_goes_to_another_engine(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: ErrorKind
) -> None:
    def fail(*_: object) -> None:
        raise failure

    constraint = StructuredOutput(GrammarKind.REGEX, f"[a-c]+{kind.name}")
    with monkeypatch.context() as patch:
        patch.setattr(CompilerProcess, "prepare", fail)
        (failed,) = run(client, [make_request("waits", constraint)])["waits"]
    assert (failed.error_kind, failed.error_field) == (kind, "")
    assert run(client, [make_request("next", constraint)])["next"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("part", ["start", "fill"])
def test_an_error_of_the_library_fails_only_its_request(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It is no fault of the client, and another engine may take the request."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the library")

    constraint = StructuredOutput(GrammarKind.REGEX, f"[a-c]+{part}")
    with monkeypatch.context() as patch:
        if part == "start":
            patch.setattr(StructuredOutputManager, "_constraint", fail)
        else:
            patch.setattr(RequestConstraint, "fill_rows", fail)
        outputs = run(client, [make_request("bad", constraint), make_request("good", None, max_tokens=5, stop=())])
    (failed,) = outputs["bad"]
    assert (failed.finish_reason, failed.error_field, failed.error) == (FinishReason.ERROR, "", FAILED)
    assert outputs["good"][-1].finish_reason is FinishReason.LENGTH
    check_idle(client._core.scheduler)
    assert run(client, [make_request("next", DATE)])["next"][-1].finish_reason is FinishReason.STOP


def test_accepted_tokens_are_replayed(client: InprocClient) -> None:
    whole = run(client, [make_request("a", DATE, prompt=[9])])["a"]
    token_ids = [token_id for output in whole for token_id in output.new_token_ids]
    for cut in range(1, len(token_ids) - 1):
        rest = run(client, [make_request("b", DATE, prompt=[9], accepted=token_ids[:cut])])["b"]
        assert [token_id for output in rest for token_id in output.new_token_ids] == token_ids[cut:]


def test_accepted_tokens_that_the_grammar_forbids_are_an_error(client: InprocClient) -> None:
    (output,) = run(client, [make_request("a", DATE, accepted=encode("nineteen"))])["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "structured_outputs: a token does not follow the grammar"
    check_idle(client._core.scheduler)


def test_without_stop_tokens_a_complete_text_ends_the_request(client: InprocClient) -> None:
    outputs = run(client, [make_request("a", DATE, stop=()), make_request("b", DATE, min_tokens=500)])
    for request_id in ("a", "b"):
        assert len(text_of(outputs[request_id])) == len("2026-11")
        last = outputs[request_id][-1]
        assert (last.finish_reason, last.stop_token_id, last.new_token_ids) == (FinishReason.STOP, None, [])
    check_idle(client._core.scheduler)


def test_one_cut_off_ends_with_length(client: InprocClient) -> None:
    outputs = run(client, [make_request("a", DATE, max_tokens=3)])["a"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert text_of(outputs).startswith("20")


def test_preempted_requests_continue_in_their_grammars() -> None:
    client = make_client(num_blocks=24)
    requests = [make_request(f"r{n}", json_schema(PERSON), prompt=[n + 1] * 6, max_tokens=60) for n in range(8)]
    outputs = run(client, requests)
    assert client._core.scheduler.stats().num_preemptions > 0
    alone = make_client()
    for request in requests:
        request_id = request.request_id
        (expected,) = run(alone, [request]).values()
        assert text_of(outputs[request_id]) == text_of(expected)
    check_idle(client._core.scheduler)
    client.close()
    alone.close()


def test_an_engine_without_a_tokenizer_refuses_by_name() -> None:
    core = make_core()
    core.add_request(make_request("a", DATE))
    (output,) = finish(core)["a"]
    assert output.error == "structured_outputs: this engine has no tokenizer to constrain its output by"
    assert output.error_field == "structured_outputs"


def test_a_full_queue_of_compiles_is_not_the_requests_fault() -> None:
    client = make_client()
    grammars = client._core._grammars
    assert grammars is not None
    grammars._compiler._queue = CompileQueue(max_pending=0, max_pending_per_tenant=1)
    client.add_request(make_request("engine", DATE))
    grammars._compiler._queue = CompileQueue(max_pending_per_tenant=0)
    client.add_request(make_request("tenant", DATE))
    kinds = {output.request_id: (output.error_kind, output.error_field) for output in client.get_output().outputs}
    assert kinds == {"engine": (ErrorKind.ENGINE_FULL, ""), "tenant": (ErrorKind.TENANT_FULL, "")}
    check_idle(client._core.scheduler)
    client.close()


def test_aborted_requests_leave_no_compile_behind() -> None:
    client = make_client()
    bombs = [json_schema({"type": "integer", "multipleOf": 99_999_989 - n}) for n in range(40)]
    for n, bomb in enumerate(bombs):
        client.add_request(make_request(f"bomb{n}", bomb))
    client.abort_requests([f"bomb{n}" for n in range(40)])
    grammars = client._core._grammars
    assert grammars is not None
    assert len(grammars._compiler._queue) == 0
    assert len(grammars._compiler._known) <= NUM_COMPILERS
    assert run(client, [make_request("b", DATE)])["b"][-1].finish_reason is FinishReason.STOP
    client.close()


@pytest.mark.parametrize(("stop", "kept"), [((), len("2026-11")), ((EOS,), len("2026-11"))])
def test_the_next_turn_of_a_session_continues_the_whole_text(
    client: InprocClient, stop: tuple[int, ...], kept: int
) -> None:
    """Only a stop token is left out, which is not part of the text."""
    request = make_request("session", DATE, prompt=[1], stop=stop)
    request.resumable = True
    outputs = run(client, [request])["session"]
    text = [token_id for output in outputs for token_id in output.new_token_ids]
    assert len(text) == kept + len(stop)
    after = make_request("session", None, prompt=[2], max_tokens=1, stop=())
    after.resumable = True
    client.add_request(after)
    turn = client._core.scheduler.requests["session\0002"]
    assert turn.prompt_token_ids == [1, *text[:kept], 2]
    client.abort_requests(["session"])
