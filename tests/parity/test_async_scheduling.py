"""Async scheduling over a real model: whatever a request carries and whatever befalls it, on and off say the same."""

import pytest
from msgspec.structs import replace

from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.engine_core.data.core_params import CoreSamplingParams as CoreParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason, Logprobs
from tokenloom.request.sampling_params import RepetitionDetectionParams

BUDGET = 48  # tokens of a step: prompts take several
PROMPTS = [
    "Once upon a time",
    "The dog and the cat went to the river. " * 4,
    "One, two, three, four, five, six, seven",
    "A short story about a bird that could not fly and a fish that could. " * 3,
    "The",
    "She opened the door and saw " * 5,
]
ANY = SamplingParams(max_tokens=24, ignore_eos=True)
GREEDY = replace(ANY, temperature=0.0)
PARAMS = {
    "greedy": GREEDY,
    "seeds": replace(ANY, seed=7, top_p=0.9, top_k=50),
    "penalties": replace(ANY, seed=3, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    "logprobs": replace(GREEDY, logprobs=3),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=2, logprobs=1),
    "repetition": replace(
        GREEDY,
        logit_bias={300: 9.0},
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3),
    ),
    "stop tokens": replace(ANY, seed=5, stop_token_ids=list(range(300, 900, 3)), min_tokens=3),
    "stop strings": replace(ANY, seed=6, stop=["e", "th"], min_tokens=2),
    "masks": replace(ANY, seed=8, bad_words=["the", " a"], logit_bias={300: 4.0, 301: -100.0}),
    "samples": replace(ANY, seed=9, n=3),
    "regex": replace(ANY, seed=1, structured_outputs=StructuredOutputsParams(regex=r"([A-C]{2}-\d{3} ){2,6}[xyz]+")),
    "json": replace(
        ANY,
        seed=2,
        n=2,
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}
        ),
    ),
}


def make_llm(*, overlaps: bool, num_blocks: int = 400) -> LLM:
    return LLM(
        "tokenloom-demo",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=num_blocks,
        async_scheduling=overlaps,
    )


@pytest.fixture(scope="module", params=[400, 20], ids=["roomy", "crowded"])
def pair(request):
    """With async scheduling, and without; crowded: requests are preempted."""
    llms = [make_llm(overlaps=overlaps, num_blocks=request.param) for overlaps in (True, False)]
    yield llms
    for llm in llms:
        llm.close()


@pytest.fixture(scope="module")
def roomy():
    llms = [make_llm(overlaps=overlaps) for overlaps in (True, False)]
    yield llms
    for llm in llms:
        llm.close()


def core_of(llm):
    return llm._client._core


def told(output):
    """All that must be the same, but for log probabilities."""
    return [(sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) for sample in output.outputs]


def weights(output):
    positions = [entry for sample in output.outputs for entry in sample.logprobs or []] + (output.prompt_logprobs or [])
    return [{token: told.logprob for token, told in entry.items()} for entry in positions if entry is not None]


@pytest.mark.parametrize("name", PARAMS)
def test_on_and_off_say_the_same(pair, name):
    on, off = (llm.generate(PROMPTS, PARAMS[name], use_tqdm=False) for llm in pair)
    for overlapped, plain in zip(on, off, strict=True):
        assert told(overlapped) == told(plain)
        for found, expected in zip(weights(overlapped), weights(plain), strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    for llm in pair:
        stats = core_of(llm).scheduler.stats()
        assert stats.num_free_blocks == core_of(llm).ready.num_kv_blocks
    assert core_of(pair[0])._max_in_flight == 2
    assert core_of(pair[1])._max_in_flight == 1


def test_requests_of_every_kind_together_say_the_same(pair):
    params = list(PARAMS.values())
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    on, off = (llm.generate(prompts, params, use_tqdm=False) for llm in pair)
    assert [told(output) for output in on] == [told(output) for output in off]
    assert {sample.finish_reason for output in on for sample in output.outputs} == {"stop", "length", "repetition"}
    if core_of(pair[0]).ready.num_kv_blocks < 100:
        assert all(core_of(llm).scheduler.stats().num_preemptions for llm in pair)


class Followed:
    """Requests of one core, and what it said of each."""

    def __init__(self, llm):
        self.core = core_of(llm)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[FinishReason]] = {}
        self.prompt_logprobs: dict[str, list[Logprobs]] = {}

    def add(self, name, prompt, max_tokens=20, *, resumable=False, **params):
        params = CoreParams(**{"max_tokens": max_tokens, "seed": 11, **params})
        self.core.add_request(EngineCoreRequest(name, prompt, params, resumable=resumable))

    def step(self, times=1):
        for _ in range(times):
            for output in self.core.step().outputs:
                assert not output.error
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.new_prompt_logprobs is not None:
                    self.prompt_logprobs.setdefault(output.request_id, []).append(output.new_prompt_logprobs)
                if output.finish_reason is not None:
                    self.ends.setdefault(output.request_id, []).append(output.finish_reason)

    def finish(self):
        while self.core.has_work():
            self.step()
        assert not self.core.has_requests()
        return self


def token_ids(llm, index):
    return llm.get_tokenizer().encode(PROMPTS[index]).ids


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_prompt_logprobs_are_told_once_and_whole_though_a_chunk_was_in_flight_when_it_was_preempted(roomy, num_steps):
    runs = []
    for llm in roomy:
        run = Followed(llm)
        prompt = (token_ids(llm, 3) * 4)[: 3 * BUDGET - 5]
        run.add("a", prompt, 8, prompt_logprobs=2, temperature=0.0)
        if llm is roomy[0]:  # at the third and fourth step the last chunk is in flight
            run.step(num_steps)
            assert core_of(llm).reset_prefix_cache(preempt_running=True)
        runs.append(run.finish())
    on, off = runs
    assert on.tokens == off.tokens
    ((found,), (expected,)) = on.prompt_logprobs["a"], off.prompt_logprobs["a"]
    assert len(found.sampled) == 3 * BUDGET - 6
    assert found.token_ids == expected.token_ids
    assert found.sampled == pytest.approx(expected.sampled, abs=1e-4)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
def test_a_reset_that_preempts_changes_no_token(roomy, num_steps):
    runs = []
    for llm in roomy:
        run = Followed(llm)
        for index in range(4):
            run.add(str(index), token_ids(llm, index), frequency_penalty=0.5)
        if llm is roomy[0]:
            for _ in range(3):
                run.step(num_steps)
                assert core_of(llm).reset_prefix_cache(preempt_running=True)
        runs.append(run.finish())
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].ends == runs[1].ends


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_pauses(roomy, mode, num_steps):
    whole = Followed(roomy[1])
    paused = Followed(roomy[0])
    for run, llm in ((whole, roomy[1]), (paused, roomy[0])):
        for index in range(4):
            run.add(str(index), token_ids(llm, index))
    whole.finish()
    paused.step(num_steps)
    quiet = paused.core.pause(mode)
    while not quiet.done():
        paused.step()
    assert not paused.core.scheduler.is_advancing
    while paused.core.has_work():  # what ended by the pause is told
        paused.step()
    paused.core.resume()
    paused.finish()
    if mode == "abort":
        assert all(ends == [FinishReason.ABORT] for ends in paused.ends.values())
        assert all(whole.tokens[name][: len(tokens)] == tokens for name, tokens in paused.tokens.items())
    else:
        assert paused.tokens == whole.tokens


def test_sessions(roomy):
    runs = []
    for llm in roomy:
        run = Followed(llm)
        first, *others = (token_ids(llm, index) for index in (0, 2, 4))
        repetition = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=3)
        run.add("s", first, resumable=True, temperature=0.0, repetition_detection=repetition)
        run.add("other", token_ids(llm, 3))
        for prompt in others:
            run.step(3)
            run.add("s", prompt, resumable=prompt is not others[-1], stop_token_ids=tuple(range(0, 4096, 9)))
        runs.append(run.finish())
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].ends == runs[1].ends
    assert len(runs[0].ends["s"]) == 3
