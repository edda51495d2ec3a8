"""lm_eval's command with local-completions: likelihoods agree with transformers' own; texts end at their stops."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OUT = Path(os.environ["OUT"])
QUESTIONS = [
    {"context": "Once upon a time", "choices": [" there was a little", " a scheduler ran"], "label": 0},
    {"context": "What is a KV block?", "choices": [" A block of memory", " A song"], "label": 0},
    {"context": "The scheduler", "choices": [" runs every step", " sleeps"], "label": 0},
    {"context": "One, two,", "choices": [" three, four", " five", " A B C D E F G"], "label": 0},
]
TOLERANCE = 1e-4
"""Of a log probability, as a mean over the tokens; both sides compute in float32."""
COMMON = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}, "test_split": "test"}
TASKS: list[dict[str, Any]] = [
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    {
        "task": "texts",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 32, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    {
        "task": "perplexity",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
]


def main() -> None:
    (OUT / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for task in TASKS:
        (OUT / f"{task['task']}.yaml").write_text(json.dumps(COMMON | task))  # JSON is YAML
    evaluate()
    pairs = [(each["context"], choice) for each in QUESTIONS for choice in each["choices"]]
    pairs += [("", each["context"] + each["choices"][0]) for each in QUESTIONS]
    told = [pair for sample in samples("choices") for pair in sample["filtered_resps"]]
    told += [(sample["filtered_resps"][0], None) for sample in samples("perplexity")]
    worst = 0.0
    for pair, (total, greedy), expected in zip(pairs, told, likelihoods(pairs), strict=True):
        worst = max(worst, abs(float(total) - expected["sum"]) / expected["tokens"])
        assert greedy is None or str(greedy) == str(expected["greedy"]), pair
    assert worst < TOLERANCE, worst
    texts = [sample["filtered_resps"][0] for sample in samples("texts")]
    assert len(texts) == len(QUESTIONS)
    assert any(texts)
    assert not any("." in text for text in texts), texts
    print(f"choices, texts, perplexity: {len(pairs)} loglikelihoods within {worst:.1e} a token of transformers'")


def evaluate() -> None:
    arguments = {
        "model": os.environ["TOKENLOOM_MODEL"],
        "base_url": os.environ["TOKENLOOM_URL"] + "/v1/completions",
        "tokenizer": os.environ["TOKENLOOM_CHECKPOINT"],
        "num_concurrent": 4,
        "max_length": 512,
    }
    command = [str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", ",".join(task["task"] for task in TASKS), "--include_path", str(OUT), "--batch_size", "2"]
    subprocess.run([*command, "--output_path", "results", "--log_samples"], cwd=OUT, check=True)


def samples(task: str) -> list[dict[str, Any]]:
    """By document."""
    (file,) = OUT.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


def likelihoods(pairs: list[tuple[str, str]]) -> list[dict[str, float]]:
    """By transformers, in the environment that has torch."""
    script = Path(__file__).with_name("likelihoods.py")
    command = [os.environ["TOKENLOOM_PYTHON"], str(script), os.environ["TOKENLOOM_CHECKPOINT"]]
    done = subprocess.run(command, input=json.dumps(pairs), stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
