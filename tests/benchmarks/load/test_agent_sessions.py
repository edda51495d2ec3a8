"""Sessions of agents that are made from a seed."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from tokenloom.bench.load.agent_sessions import AgentClient, AgentSession, Role, Shape, make_sessions
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL

SHAPE = replace(Shape(), turns=(12, 16), user_share=0.3, branch_share=0.5, fan_out_share=0.2)
CLIENTS = tuple(AgentClient)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def sessions(tokenizer: Tokenizer) -> list[AgentSession]:
    return make_sessions(6, CLIENTS, SHAPE, 1, tokenizer)


def test_the_same_seed_gives_the_same_sessions(tokenizer: Tokenizer, sessions: list[AgentSession]) -> None:
    again = make_sessions(6, CLIENTS, SHAPE, 1, tokenizer)
    other = make_sessions(6, CLIENTS, SHAPE, 2, tokenizer)
    texts, same, others = ([each.line.turns[-1].messages for each in made] for made in (sessions, again, other))
    assert texts == same
    assert all(a != b for a, b in zip(texts, others, strict=True))


def test_clients_take_turns_and_share_their_instructions_only(sessions: list[AgentSession]) -> None:
    assert [session.client for session in sessions] == [*CLIENTS, *CLIENTS]
    first, second = sessions[0].line, sessions[3].line
    assert (first.instructions, first.tools) == (second.instructions, second.tools)
    assert first.project != second.project
    assert first.instructions != sessions[1].line.instructions


def test_lengths_are_those_of_the_shape(tokenizer: Tokenizer, sessions: list[AgentSession]) -> None:
    for session in sessions:
        line = session.line
        assert SHAPE.turns[0] <= len(line.turns) <= SHAPE.turns[1]
        tools = [tool["description"] for tool in line.tools]
        tokens = len(tokenizer.encode(" ".join((line.instructions, line.project, *tools))).ids)
        assert 0.6 * SHAPE.system[0] < tokens < SHAPE.system[1], "schemas and their texts come on top"
        assert all(SHAPE.gaps[0] <= turn.gap <= SHAPE.gaps[1] for turn in line.turns[1:])


def test_a_turn_continues_what_the_session_had_sent(sessions: list[AgentSession]) -> None:
    for line in (line for session in sessions for line in session.lines()):
        seen = []
        for turn in line.turns:
            if turn.past is not None:
                assert turn.messages[: turn.shared] == turn.past.messages[: turn.shared]
                assert turn.messages[turn.shared] != dict(enumerate(turn.past.messages)).get(turn.shared)
                assert turn.past in seen or not turn.shared
            seen.append(turn)


def test_users_go_back_to_what_they_had_asked(sessions: list[AgentSession]) -> None:
    branches = [turn for session in sessions for turn in session.line.turns if turn.is_branch]
    assert branches
    for turn in branches:
        assert turn.past is not None
        assert turn.shared == len(turn.past.messages) - 1
        assert turn.messages[-1].role is Role.USER


def test_every_call_has_its_result(sessions: list[AgentSession]) -> None:
    for line in (line for session in sessions for line in session.lines()):
        messages = line.turns[-1].messages
        calls = [call.call_id for message in messages for call in message.calls]
        assert calls == [message.answers for message in messages if message.role is Role.TOOL]
        assert len(set(calls)) == len(calls) > 0


def test_sub_agents_report_to_the_turn_after_them(sessions: list[AgentSession]) -> None:
    turns = [turn for session in sessions for turn in session.line.turns if turn.sub_agents]
    assert any(len(turn.sub_agents) > 1 for turn in turns)
    for turn in turns:
        results = turn.messages[-len(turn.sub_agents) :]
        assert all(message.role is Role.TOOL for message in results)
        assert all(not line.project and len(line.tools) for line in turn.sub_agents)


def test_only_sub_agents_of_an_earlier_call_are_past(sessions: list[AgentSession]) -> None:
    for session in sessions:
        groups = [turn.sub_agents for turn in session.line.turns if turn.sub_agents]
        for number, group in enumerate(groups):
            pasts = {line.turns[0].past for line in group}
            assert pasts == ({None} if number == 0 else {groups[0][0].turns[0]})
