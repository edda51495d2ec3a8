"""Sleep, waking and new weights of the offline API."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from tokenloom import SamplingParams
from tokenloom.engine_core.data.errors import EnginePausedError, UtilityError
from tokenloom.model_files.model_path import DEMO_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
STORY = "Once upon a time"


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request, make_llm):
    llm = make_llm(max_num_seqs=4, num_gpu_blocks_override=64, async_scheduling=request.param)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def is_awake_and_idle_afterwards(llm):
    yield
    core = llm._client._core
    assert not core.sleeping.is_sleeping()
    assert not core.has_requests()
    assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks
    (output,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def say(llm):
    (output,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture
def other_weights(tmp_path):
    """A copy of the demo model whose final norm is negated, so that it says something different."""
    directory = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("level", "named"), [(0, r"paused; call wake_up\(\)"), (1, r"call wake_up\(\)"), (2, r"reload_weights\(\)")]
)
def test_requests_of_a_sleeping_engine_fail_at_once(llm, level, named):
    expected = say(llm)
    llm.sleep(level)
    with pytest.raises(EnginePausedError, match=named):
        llm.generate(STORY, GREEDY, use_tqdm=False)
    with pytest.raises(EnginePausedError, match=named):
        next(llm.stream(STORY, GREEDY))
    with pytest.raises(EnginePausedError, match=named):
        llm.enqueue(STORY, GREEDY)
    assert llm.next_finished() == []
    if level == 2:
        llm.reload_weights()
    llm.wake_up()
    assert say(llm) == expected


def test_the_tag_scheduling_resumes_what_sleeps_at_level_0_and_wakes_no_part(llm):
    llm.sleep(0)
    llm.wake_up(["scheduling"])
    assert say(llm)
    llm.sleep(1)
    llm.wake_up(["scheduling"])
    with pytest.raises(EnginePausedError, match="asleep"):
        say(llm)
    llm.wake_up(["weights", "kv_cache", "scheduling"])
    assert say(llm)
    with pytest.raises(UtilityError, match="weights, kv_cache or scheduling"):
        llm.wake_up(["all"])


def test_the_error_names_the_part_that_still_sleeps(llm):
    llm.sleep()
    llm.wake_up(["weights"])
    with pytest.raises(EnginePausedError, match=r"KV cache is asleep; call wake_up\(\)"):
        say(llm)
    llm.wake_up(["kv_cache"])


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_of_a_paused_engine_fail_at_once(llm, mode):
    llm._client.call_utility("pause", mode)
    with pytest.raises(EnginePausedError, match="the engine is paused; call resume first"):
        say(llm)
    llm._client.call_utility("resume")


def test_a_stream_that_a_sleep_froze_ends_in_an_error(llm):
    """The frozen requests of other calls stay."""
    llm.enqueue(STORY, GREEDY)
    steps = llm.stream(STORY, GREEDY)
    next(steps)
    llm.sleep(0, "keep")
    with pytest.raises(EnginePausedError, match=r"call wake_up\(\)"):
        for _ in steps:
            pass
    llm.wake_up()
    (output,) = llm.next_finished()
    assert output.outputs[0].finish_reason == "length"


def test_the_modes_of_sleep(llm):
    llm.enqueue(STORY, GREEDY)
    steps = llm.stream(STORY, GREEDY)
    next(steps)
    llm.sleep(1, "wait")
    assert [*steps][-1].outputs[0].finish_reason == "length"
    assert [output.outputs[0].finish_reason for output in llm.next_finished()] == ["length"]
    llm.wake_up()
    with pytest.raises(UtilityError, match="mode 'doze' is unknown"):
        llm.sleep(1, "doze")


@pytest.mark.parametrize("is_read", [False, True])
def test_a_stream_that_a_sleep_aborted_can_be_closed(llm, is_read):
    expected = say(llm)
    steps = llm.stream([STORY, [5] * 30], GREEDY)
    next(steps)
    llm.sleep()
    if is_read:
        assert [*steps][-1].outputs[0].finish_reason == "abort"
    steps.close()
    llm.wake_up()
    assert say(llm) == expected


@pytest.mark.parametrize("is_collective", [False, True])
def test_level_two_wakes_in_vllms_order(llm, other_weights, is_collective):
    expected = say(llm)

    def reload(*path):
        if is_collective:
            llm.collective_rpc("reload_weights", path)
        else:
            llm.reload_weights(*path)

    llm.sleep(2)
    llm.wake_up(tags=["weights"])
    with pytest.raises(EnginePausedError, match=r"no weights; call reload_weights\(\)"):
        say(llm)
    reload(str(other_weights))
    with pytest.raises(EnginePausedError, match="KV cache is asleep"):
        say(llm)
    llm.wake_up(tags=["kv_cache"])
    others = say(llm)
    assert others != expected
    llm.sleep(2)
    llm.wake_up(tags=["kv_cache"])
    with pytest.raises(UtilityError, match="call reload_weights"):
        llm.wake_up()
    reload()  # those of the model that LLM was made with
    llm.wake_up()
    assert say(llm) == expected


def test_weights_are_reloaded_without_sleep(llm, other_weights):
    expected = say(llm)
    llm.reload_weights(other_weights)
    assert say(llm) != expected
    llm.reload_weights()
    assert say(llm) == expected
    with pytest.raises(ValueError, match="no such directory"):
        llm.reload_weights("/no/such/model")
    steps = llm.stream(STORY, GREEDY)
    next(steps)
    with pytest.raises(UtilityError, match="requests are running"):
        llm.reload_weights()
    steps.close()
