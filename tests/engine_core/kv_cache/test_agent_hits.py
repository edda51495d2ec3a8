"""Coding agents over models that keep a state, at a small scale: what is found of their prompts is near what a model
without states finds in equal memory."""

import itertools

from tests.engine_core.kv_cache.agent_hits import MODELS, run, turns


def test_states_cost_few_hits_of_equal_memory() -> None:
    """A hundredth of the tokens of :data:`MODELS`, and of the bytes of a state."""
    asked = turns("agent", num_sessions=8, num_turns=40, scale=0.02)
    kv_bytes, state_bytes = MODELS["Qwen3-Next-80B"]
    memory = 48 * (1 << 30) // 50
    found, plain = run(asked, kv_bytes, state_bytes // 50, memory), run(asked, kv_bytes, 0, memory)
    assert plain["share"] > 0.8
    assert found["states"] > 0
    assert plain["share"] - 0.05 <= found["share"] <= plain["share"]


def test_templates_drop_thoughts_where_the_user_speaks() -> None:
    asked = turns("agent", num_sessions=1, num_turns=40, scale=0.02)
    continued = [later.prompt[: len(turn.prompt)] == turn.prompt for turn, later in itertools.pairwise(asked)]
    assert 0 < continued.count(False) < len(asked) / 4
    assert all(turn.answer[-1] == 2 for turn in asked)
