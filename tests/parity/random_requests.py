"""Random requests with every sampling parameter, equal for equal seeds."""

import random

from tests.parity.test_async_scheduling import PROMPTS
from tokenloom import SamplingParams, StructuredOutputsParams
from tokenloom.request.sampling_params import RepetitionDetectionParams

REGEX = r"([A-C]{2}-\d{3} ){2,6}[xyz]+"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}
REPETITION = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)


def random_request(seed: int) -> tuple[str, SamplingParams]:
    """A prompt, parts of which occur several times, and its parameters."""
    rng = random.Random(seed)
    words = " ".join(rng.sample(PROMPTS, 2)).split()
    start = rng.randrange(len(words))
    prompt = " ".join(words[start : start + rng.randint(1, 12)] * rng.randint(1, 4))

    def maybe(share: float, **values: object) -> dict[str, object]:
        return values if rng.random() < share else {}

    params: dict[str, object] = {
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice((0.0, 0.0, 0.3, 1.0)),
        "seed": seed,
        "ignore_eos": rng.random() < 0.8,
        **maybe(0.3, top_k=rng.randint(1, 50)),
        **maybe(0.3, top_p=rng.uniform(0.5, 1.0)),
        **maybe(0.2, min_p=0.05),
        **maybe(0.3, logprobs=rng.randint(0, 3)),
        **maybe(0.2, prompt_logprobs=rng.randint(0, 2)),
        **maybe(0.2, repetition_penalty=rng.choice((0.8, 1.2))),
        **maybe(0.2, presence_penalty=0.5, frequency_penalty=rng.choice((-0.5, 0.5))),
        **maybe(0.2, stop=rng.sample(["e", "th", " a", "ed "], 2), include_stop_str_in_output=rng.random() < 0.5),
        **maybe(0.2, stop_token_ids=rng.sample(range(256, 2048), 200)),
        **maybe(0.2, bad_words=["the", " a"]),
        **maybe(0.2, logit_bias={300: 4.0, 301: -100.0}),
        **maybe(
            0.2, repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
        ),
    }
    if params["temperature"] and rng.random() < 0.4:
        params["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        params["structured_outputs"] = StructuredOutputsParams(**rng.choice(({"regex": REGEX}, {"json": SCHEMA})))
    if rng.random() < 0.3:
        params["min_tokens"] = rng.randint(0, int(str(params["max_tokens"])))
    return prompt, SamplingParams(**params)  # type: ignore[arg-type]
