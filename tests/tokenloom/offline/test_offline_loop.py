"""Several calls at a time: what one of them gets wrong is its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenloom import LLM, SamplingParams

BAD = SamplingParams(max_tokens=2, structured_outputs={"regex": "("})
"""Only the core, which compiles grammars, refuses it."""
SHORT, LONG = (SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0) for count in (4, 30))


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "async scheduling"])
def llm(request: Any, make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(max_num_seqs=16, async_scheduling=request.param)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    core = llm._client._core
    while core.has_work():
        assert not core.step().outputs
    assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks
    assert not llm._loop._live
    assert llm.next_finished() == []


def test_a_wrong_call_leaves_those_of_others_alone(llm: LLM) -> None:
    alone = [output.outputs[0].token_ids for output in llm.generate(["x", "hello"], [LONG, SHORT], use_tqdm=False)]
    enqueued = llm.enqueue("hello", SHORT)
    stream = llm.stream(["x"], LONG)
    next(stream)
    good, bad = llm.generate(["x", "bad"], [LONG, BAD], use_tqdm=False)
    assert (good.error, good.outputs[0].token_ids) == (None, alone[0])
    assert "regex" in (bad.error or "")
    with pytest.raises(ValueError, match="regex"):
        llm.generate(["bad", "bad"], BAD, use_tqdm=False)
    *_, last = stream
    assert (last.outputs[0].finish_reason, last.outputs[0].token_ids) == ("length", alone[0])
    (output,) = llm.next_finished()
    assert (output.request_id, output.outputs[0].token_ids, output.error) == (enqueued, alone[1], None)


@pytest.mark.parametrize("n", [1, 3])
def test_a_wrong_request_that_was_enqueued_comes_back_with_what_is_wrong(llm: LLM, n: int) -> None:
    bad = llm.enqueue("a", SamplingParams(n=n, max_tokens=2, structured_outputs={"regex": "("}))
    good = llm.enqueue("a", SHORT)
    found = {}
    while ended := llm.next_finished():
        found |= {output.request_id: output for output in ended}
    assert found.keys() == {bad, good}
    assert "regex" in (found[bad].error or "")
    assert {each.finish_reason for each in found[bad].outputs} == {"error"}
    assert found[good].error is None
    assert found[good].outputs[0].finish_reason == "length"


def test_a_wrong_stream_raises_and_another_goes_on(llm: LLM) -> None:
    stream = llm.stream(["x"], LONG)
    next(stream)
    with pytest.raises(ValueError, match="regex"):
        list(llm.stream(["a"], BAD))
    *_, last = stream
    assert last.outputs[0].finish_reason == "length"


def test_of_several_in_a_stream_one_fails_alone(llm: LLM) -> None:
    too_long = [5] * 256
    last = {output.request_id: output for output in llm.stream(["x", "a", too_long], [LONG, BAD, LONG])}
    good, bad, long = (last[key] for key in sorted(last, key=int))
    assert (good.error, len(good.outputs[0].token_ids)) == (None, 30)
    assert "regex" in (bad.error or "")
    assert "maximum context length" in (long.error or "")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_a_failed_step_ended_is_returned_as_such(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    enqueued = llm.enqueue("hello", LONG)
    stream = llm.stream(["x"], LONG)
    next(stream)

    def fail() -> None:
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm._client, "get_output", fail)
        with pytest.raises(error, match="broken"):
            llm.generate("a", SHORT, use_tqdm=False)
    with pytest.raises(RuntimeError, match="broken"):
        list(stream)
    (output,) = llm.next_finished()
    assert (output.request_id, output.outputs[0].finish_reason) == (enqueued, "error")
    assert "broken" in (output.error or "")


def test_a_conversation_that_cannot_be_rendered_is_a_value_error(llm: LLM) -> None:
    for messages in ([{"role": "user", "content": 5}], [{"role": "user", "content": {"a": "b"}}], [7]):
        with pytest.raises(ValueError, match="must be"):
            llm.enqueue_chat(messages)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogate"):
        llm.enqueue_chat([{"role": "user", "content": "\ud83d"}])
