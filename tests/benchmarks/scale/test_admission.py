"""Tests with a real output processor that prompts beyond its room are refused."""

from tokenloom.bench.scale.admission import measure


async def test_prompts_beyond_the_room_are_sent_elsewhere() -> None:
    prompt_bytes = 2 * 4 * 4096  # of a prompt and its message to the engine
    result = await measure(prompts=100, prompt_tokens=4096, max_prompt_bytes=60 * prompt_bytes)
    assert (result.admitted, result.refusals) == (60, {"TRY_ELSEWHERE": 40})
    assert 0 < result.idle_bytes <= result.peak_bytes
