"""Evaluate a model on questions with known answers, in this process, without any service.

The loop keeps a bounded number of requests in the engine: it adds one whenever one has ended, and stops a request as
soon as more tokens cannot change the result.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenloom import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tokenloom.model_files.model_path import DEMO_MODEL

SUMS = tuple((f"What is {left} + {right}?", str(left + right)) for left in range(2, 8) for right in range(2, 8))
_LONGEST = 120
"""Characters without a right answer after which a request is not worth its tokens."""


@dataclass
class Asked:
    """A question that is being answered."""

    question: str
    expected: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        return self.expected in self.text


def evaluate(engine: LLMEngine, questions: Sequence[tuple[str, str]], at_once: int) -> Iterator[Asked]:
    """Yield each question when it is answered, in the order in which the answers end."""
    left, live = deque(Asked(*each) for each in questions), dict[str, Asked]()
    names = map(str, range(len(questions)))
    params = SamplingParams(temperature=0, max_tokens=64, output_kind=RequestOutputKind.DELTA)
    while left or live:
        while left and len(live) < at_once:
            name, asked = next(names), left.popleft()
            engine.add_request(name, engine.chat_prompt([{"role": "user", "content": asked.question}]), params)
            live[name] = asked
        for output in engine.step():
            asked = live[output.request_id]
            asked.text += output.outputs[0].text
            if asked.is_right or len(asked.text) > _LONGEST:
                engine.abort_request(output.request_id)  # of no effect if it has ended
            elif not output.finished:
                continue
            yield live.pop(output.request_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint directory or hub id")
    parser.add_argument("--at-once", type=int, default=16, help="requests in the engine at a time")
    args = parser.parse_args()
    engine = LLMEngine(EngineArgs(args.model))
    try:
        answers = list(evaluate(engine, SUMS, args.at_once))
    finally:
        engine.close()
    for asked in answers:
        print(f"{'right' if asked.is_right else 'wrong'}: {asked.question} {asked.text.strip()!r}")
    print(f"{sum(asked.is_right for asked in answers)} of {len(answers)} are right")


if __name__ == "__main__":
    main()
