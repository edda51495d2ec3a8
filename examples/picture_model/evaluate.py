"""Asks a picture model about pictures that it has not seen, and prints how many of its answers are right."""

import argparse
import random
from collections import Counter
from pathlib import Path
from typing import Any

from tokenloom import LLM, SamplingParams

from .drawing import draw, make_scene
from .questions import MAKERS, without_picture

Asked = tuple[str, Any, str, str]
"""The kind of a question, its picture or None, the question and its right answer."""


def unseen(seed: int, pictures: int) -> list[Asked]:
    """Return two questions about each of ``pictures``, and one without a picture for each five of them."""
    rng = random.Random(f"unseen {seed}")
    asked: list[Asked] = []
    others = [kind for kind in MAKERS if kind != "what"]
    for index in range(pictures):
        scene = make_scene(rng)
        picture = draw(scene, rng)
        asked += [(kind, picture, *MAKERS[kind](scene, rng)) for kind in ("what", others[index % len(others)])]
    return asked + [("no picture", None, *without_picture(rng)) for _ in range(pictures // 5)]


def answers(llm: LLM, asked: list[Asked]) -> list[str]:
    """Return the greedy answers of the model."""
    conversations = []
    for _, picture, question, _ in asked:
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if picture is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": picture}})
        conversations.append([{"role": "user", "content": parts}])
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tokenloom-picture", help="folder of the checkpoint")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for the pictures of wrong answers")
    args = parser.parse_args()
    asked = unseen(args.seed, args.pictures)
    llm = LLM(args.model, dtype="float32")
    found = answers(llm, asked)
    llm.close()
    total, right = Counter(kind for kind, *_ in asked), Counter[str]()
    for index, ((kind, picture, question, wanted), answer) in enumerate(zip(asked, found, strict=True)):
        right[kind] += answer == wanted
        if answer != wanted:
            print(f"{index}: {question!r} wanted {wanted!r}, got {answer!r}")
            if args.save and picture is not None:
                args.save.mkdir(parents=True, exist_ok=True)
                picture.save(args.save / f"{index}.png")
    print("| kind | right |\n|---|---|")
    for kind in total:
        print(f"| {kind} | {right[kind]}/{total[kind]} |")
    print(f"| **all** | **{right.total()}/{total.total()}** |")


if __name__ == "__main__":
    main()
