import numpy as np
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_core, make_request, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.control import sessions
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens


def part(prompt: list[int], max_tokens: int = 5, *, last: bool = False) -> EngineCoreRequest:
    message = make_request("session", prompt, max_tokens)
    message.resumable = not last
    return message


def turn(core: EngineCore, message: EngineCoreRequest) -> list[int]:
    core.add_request(message)
    outputs = finish(core)["session"]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[0].token_index == 0
    return tokens_of(outputs)


def test_each_turn_continues_all_but_the_last_token_of_the_one_before() -> None:
    core = make_core()
    first = turn(core, part([1, 2, 3]))
    assert first == expected_tokens([1, 2, 3], 5, VOCAB_SIZE)
    said = [1, 2, 3, *first[:-1], 4, 5]
    second = turn(core, part([4, 5], 3))
    assert second == expected_tokens(said, 3, VOCAB_SIZE)
    third = turn(core, part([6], 2, last=True))
    assert third == expected_tokens([*said, *second[:-1], 6], 2, VOCAB_SIZE)
    assert not core.sessions.live


def test_between_turns_a_session_holds_nothing_and_finds_what_it_computed() -> None:
    core = make_core(block_size=4)
    turn(core, part(list(range(20)), 4))
    check_idle(core.scheduler)
    assert not core.has_requests()
    core.add_request(part([50]))
    first = finish(core)["session"][0]
    assert first.prefill_stats is not None
    assert (first.prefill_stats.num_prompt_tokens, first.prefill_stats.num_cached_tokens) == (24, 20)


def test_inputs_wait_for_the_turns_before_them() -> None:
    core = make_core()
    for message in (part([1], 4), part([2], 4), part([], last=True)):
        core.add_request(message)
    outputs = finish(core)["session"]
    first = expected_tokens([1], 4, VOCAB_SIZE)
    assert tokens_of(outputs) == first + expected_tokens([1, *first[:-1], 2], 4, VOCAB_SIZE)
    assert sum(output.finish_reason is FinishReason.LENGTH for output in outputs) == 2
    assert not core.sessions.live


def test_a_turn_without_output_keeps_its_whole_prompt() -> None:
    core = make_core()
    own = sessions.Sessions(core.scheduler)
    own.add(part([1, 2, 3]))
    core.scheduler.abort_requests(["session\0001"])
    own.take([EngineCoreOutput("session\0001", [], finish_reason=FinishReason.STOP)])
    own.add(part([4]))
    assert tokens_of(finish(core)["session\0002"]) == expected_tokens([1, 2, 3, 4], 5, VOCAB_SIZE)


def test_closing_an_idle_session_says_nothing() -> None:
    core = make_core()
    turn(core, part([1]))
    core.add_request(part([], last=True))
    assert not core.sessions.live
    assert not finish(core)


def test_an_abort_ends_the_session_and_frees_its_name() -> None:
    core = make_core()
    core.add_request(part([1], 50))
    core.step()
    core.add_request(part([2]))
    core.abort_requests(["session"])
    check_idle(core.scheduler)
    assert not core.sessions.live
    assert turn(core, part([7], last=True)) == expected_tokens([7], 5, VOCAB_SIZE)


def test_an_abort_during_a_step_reaches_the_present_turn() -> None:
    core = make_core()
    turn(core, part([1]))
    core.add_request(part([2], 50))
    assert not core.step(lambda: ["session"]).outputs
    check_idle(core.scheduler)


def test_a_session_that_outgrows_the_context_ends_with_an_error() -> None:
    core = make_core(max_model_len=16)
    turn(core, part([1] * 8))
    core.add_request(part([2] * 8))
    (output,) = finish(core)["session"]
    assert output.finish_reason is FinishReason.ERROR
    assert "prompt has 20 tokens" in output.error
    assert not core.sessions.live


def test_inputs_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_INPUTS", 2)
    core = make_core()
    for _ in range(3):
        core.add_request(part([1], 50))
    with pytest.raises(ValueError, match="2 inputs of the session wait already"):
        core.add_request(part([1]))
    assert not core.sessions.live
    check_idle(core.scheduler)


def test_a_session_refuses_kv_exchange_and_embeddings() -> None:
    leased, embedded = part([1]), part([1])
    leased.lease_id = b"lease"
    with pytest.raises(ValueError, match="cannot exchange KV"):
        make_core().add_request(leased)
    embedded.prompt_embeds = [EmbedsSpan(0, np.zeros((1, 4), dtype=np.float32))]
    with pytest.raises(ValueError, match="cannot have prompt_embeds"):
        make_core().add_request(embedded)
