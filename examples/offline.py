"""Run a model in this process, without any service."""

import argparse

from tokenloom import LLM, SamplingParams
from tokenloom.model_files.model_path import DEMO_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint directory or hub id")
    args = parser.parse_args()
    llm = LLM(model=args.model)
    for output in llm.generate(
        ["Once upon a time", "Long ago"], SamplingParams(temperature=0.8, max_tokens=60, seed=1)
    ):
        print(f"{output.prompt!r} → {output.outputs[0].text!r}")
    answer = llm.chat([{"role": "user", "content": "What is 8 + 9?"}], SamplingParams(temperature=0, max_tokens=40))
    print(answer[0].outputs[0].text)


if __name__ == "__main__":
    main()
