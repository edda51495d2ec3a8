"""lm_eval's local-completions: log-likelihoods agree with transformers' own; texts are generated to their stops."""

import json
import os
import subprocess
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [
    ("Once upon a time", " there was a little"),
    ("What is a KV block?", " A block of memory"),
    ("The scheduler", " runs every step"),
    ("One, two,", " three, four"),
    ("A", " B C D E F G"),
]
TOLERANCE = 2e-2
"""Of a log probability, as a mean over the tokens: the checkpoint is bfloat16, in which both sides compute."""


def main() -> None:
    model = LocalCompletionsAPI(
        model=os.environ["TOKENLOOM_MODEL"],
        base_url=os.environ["TOKENLOOM_URL"] + "/v1/completions",
        tokenizer=os.environ["TOKENLOOM_CHECKPOINT"],
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_retries=1,
        max_length=512,
    )
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    worst = 0.0
    for pair, told, expected in zip(PAIRS, model.loglikelihood(asked), likelihoods(), strict=True):
        worst = max(worst, abs(told[0] - expected["sum"]) / expected["tokens"])
        assert told[1] == expected["greedy"], pair
    assert worst < TOLERANCE, worst
    until = {"until": ["."], "max_gen_toks": 32, "temperature": 0}
    asked = [Instance("generate_until", {}, (pair[0], until), index) for index, pair in enumerate(PAIRS)]
    texts = model.generate_until(asked)
    assert len(texts) == len(PAIRS)
    assert not any("." in text for text in texts)
    print(f"{len(PAIRS)} loglikelihoods within {worst:.4f} a token of transformers' (bf16), generate_until")


def likelihoods() -> list[dict[str, float]]:
    """By transformers, in the environment that has torch."""
    script = Path(__file__).with_name("likelihoods.py")
    command = [os.environ["TOKENLOOM_PYTHON"], str(script), os.environ["TOKENLOOM_CHECKPOINT"]]
    done = subprocess.run(command, input=json.dumps(PAIRS), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
