"""What is made of replayed sessions; the replay itself, once and short, for each client."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.fake_server import ANSWER, FakeServer
from tokenloom.bench.load.agent_sessions import AgentClient, AgentSession, Shape, make_sessions
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.mesh.agents import (
    AgentsCase,
    AgentWorker,
    HeldTokens,
    Placement,
    Policy,
    Replay,
    arms,
    mesh_options,
    run_case,
)
from tokenloom.bench.mesh.agents_report import TurnRecord, cached_shares, misses, summarize, tables
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL

CASE = AgentsCase(sessions=3, turns=(3, 3), kv=3.0, time_scale=200.0, step_ms=1.0)
HELD = HeldTokens(160_000.0, 16_000.0)


def record(prompt: int, cached: int, past: TurnRecord | None = None, number: int = 2, **members: Any) -> TurnRecord:
    outcome = Outcome(0.0, input_tokens=prompt, output_tokens=4, ttft=0.1, cached_tokens=cached)
    return TurnRecord(AgentClient.CODEX, number, past=past, outcome=outcome, **members)


def engine_flags(case: AgentsCase) -> dict[str, str]:
    flags = mesh_options(DEMO_MODEL, case, HELD, Path("/offload")).flags["engine"]
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_new_tokens_are_those_beyond_what_the_session_had_sent() -> None:
    first = record(1000, 0, number=1)
    assert (first.new, first.recomputed, first.missed) == (1016, 1000, 0)
    second = record(1200, 992, first)
    assert (second.known, second.new, second.recomputed, second.missed) == (1000, 216, 208, 0)
    back = record(1100, 880, second, dropped=300, is_branch=True)
    assert (back.known, back.new, back.missed) == (900, 216, 4)


def test_a_ratio_leaves_first_requests_out() -> None:
    first = record(1000, 0, number=1)
    report = summarize("arm", [first, record(1184, 992, first), record(1184, 384, first)], 2.0)
    assert (report["later"]["new_tokens"], report["later"]["recomputed_tokens"]) == (400, 992)
    assert report["later"]["recomputed_per_new"] == report["clients"]["codex"]["recomputed_per_new"] == 2.48
    assert report["first"]["recomputed_tokens"] == 1000
    assert report["later"]["ttft_ms_p99"] == 100.0


def test_misses_are_counted_by_cause() -> None:
    first = record(1000, 0, number=1)
    named, unnamed = record(1200, 192, first), record(1200, 592, first)
    named.outcome.miss_cause = "evicted"
    counts = misses([first, record(1200, 992, first), named, unnamed, named])
    assert (counts["requests"], counts["named_share"]) == (3, 0.6667)
    assert counts["by_cause"]["evicted"] == {"requests": 2, "tokens": 1584}
    assert misses([first])["named_share"] == 1.0


def test_shares_are_those_of_the_main_lines_turns() -> None:
    first = record(1000, 0, number=1)
    others = [record(1200, 500, first), record(1200, 1100, first, number=4), record(1200, 0, first, is_sub_agent=True)]
    assert cached_shares(others) == {"2": 0.5, "3-5": 1.0}, "a generated token that fits as well counts once"


def test_failed_requests_are_no_figures() -> None:
    failed = record(0, 0)
    failed.outcome.error = "HTTP 503"
    report = summarize("arm", [failed], 1.0)
    assert (report["failed"], report["requests"], report["errors"]) == (1, 0, ["HTTP 503"])
    assert [table.row_count for table in tables([report])] == [1, 1, 0]


def test_engines_share_the_blocks() -> None:
    assert engine_flags(replace(CASE, kv=1.0))["--num-kv-blocks"] == "5000"
    assert engine_flags(replace(CASE, kv=0.01))["--num-kv-blocks"] == "1250", "the longest prompt always fits"


def test_the_timed_worker_is_as_much_quicker_as_time_is() -> None:
    flags = engine_flags(replace(CASE, time_scale=10.0, prefill_rate=20_000.0))
    assert float(flags["--hash-token-seconds"]) == pytest.approx(5e-6)
    assert flags["--kv-offload-path"] == "/offload"
    flags = engine_flags(replace(CASE, worker=AgentWorker.MODEL, offload=False))
    assert flags["--load-format"] == "dummy"
    assert not {"--hash-token-seconds", "--kv-offload-path"} & flags.keys()


def test_an_arm_names_its_placement() -> None:
    case = replace(CASE, placement=Placement.COST)
    assert mesh_options(DEMO_MODEL, case, HELD, Path("/offload")).flags["coordinator"] == ("--placement", "cost")
    assert case.title == "cost, sessions, KV 3, offload"


def test_without_sessions_the_coordinator_knows_none() -> None:
    case = replace(CASE, policy=Policy.LRU, offload=False)
    assert "--no-sessions" in mesh_options(DEMO_MODEL, case, HELD, Path("/offload")).flags["coordinator"]
    assert case.title == "score, lru, KV 3"


def test_engines_share_a_folder_only_where_the_arm_says_so() -> None:
    flags = engine_flags(replace(CASE, policy=Policy.SHARED))
    assert flags["--kv-store"] == "file:///offload/shared"
    assert flags["--kv-offload-path"] == "/offload"
    assert "--kv-store" not in engine_flags(CASE)


def test_arms_to_compare_follow_each_other_with_the_same_sessions() -> None:
    made = arms(CASE, 2, [1.0, 0.5], [Placement.COST], [Policy.SESSIONS, Policy.LRU])
    assert [(arm.seed, arm.kv, str(arm.policy)) for arm in made[:3]] == [
        (0, 1.0, "sessions"),
        (0, 1.0, "lru"),
        (0, 0.5, "sessions"),
    ]
    assert [arm.seed for arm in made] == [0] * 4 + [1] * 4
    assert {arm.placement for arm in made} == {Placement.COST}


async def replayed(server: FakeServer, sessions: list[AgentSession]) -> list[TurnRecord]:
    async with server.running():
        replay = Replay(replace(CASE, time_scale=1e6), load_tokenizer(DEMO_MODEL), server.base_url, lambda _: None)
        await replay.run(sessions)
    return replay.records


def opencode_sessions(count: int, **shape: Any) -> list[AgentSession]:
    made = replace(Shape(), turns=(3, 3), user_share=0.0, sub_turns=(2, 2), **shape)
    return make_sessions(count, [AgentClient.OPENCODE], made, 0, load_tokenizer(DEMO_MODEL))


async def test_sub_agents_end_before_their_reports_are_sent() -> None:
    server = FakeServer([ANSWER])
    (session,) = sessions = opencode_sessions(1, fan_out_share=1.0)
    records = await replayed(server, sessions)
    assert len(records) == len(server.bodies) == sum(len(line.turns) for line in session.lines())
    counts = [(record.is_sub_agent, record.number) for record in records]
    mains = [at for at, (is_sub_agent, _) in enumerate(counts) if not is_sub_agent]
    for turn, after, at in zip(session.line.turns[1:], mains, mains[1:], strict=False):
        assert at - after - 1 == sum(len(line.turns) for line in turn.sub_agents) > 0
    first_sub = next(record for record in records if record.is_sub_agent)
    later = [record for record in records[mains[1] :] if record.is_sub_agent and record.number == 1]
    assert later
    assert all(record.past is first_sub and record.dropped > 250 for record in later)


async def test_a_failed_request_ends_its_session() -> None:
    server = FakeServer([(503, [b"{}"])])
    records = await replayed(server, opencode_sessions(2, fan_out_share=0.0))
    assert [record.outcome.refused for record in records] == [True, True]


async def test_a_mesh_finds_what_each_client_sent_before(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    ended: list[Outcome] = []
    counts: list[int] = []

    def on_start(count: int) -> Any:
        counts.append(count)
        return ended.append

    report = await run_case(DEMO_MODEL, replace(CASE, engines=1), on_start)
    assert (report["failed"], counts) == (0, [len(ended)])
    assert set(report["clients"]) == set(map(str, AgentClient))
    for client in (AgentClient.CODEX, AgentClient.OPENCODE):
        assert 0.9 < report["clients"][client]["recomputed_per_new"] <= 1.0, client
    assert report["cached_share_by_turn"]["2"] > 0.5
    assert all(outcome.input_tokens > 15_000 for outcome in ended)
