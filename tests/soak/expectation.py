"""What the answers must be: those of one engine that nothing happens to."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.mesh.harness import VOCAB_SIZE
from tests.soak.plan import Ask
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.reasoning import FORMATS, Reasoning, marks_of


class Expectation(Protocol):
    """By worker."""

    def tokens(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The tokens of each."""

    def allows(self, prompt: list[int], expected: list[int], token: int) -> bool:
        """Whether ``token`` may follow the prompt and ``expected[:-1]``, although ``expected[-1]`` does."""


class HashExpectation:
    """Of the hash worker: exact."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEMO_MODEL)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self._marks = marks_of(FORMATS["deepseek_r1"], lambda text: encode(text).ids)

    def tokens(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._tokens(ask) for ask in asks]

    def _tokens(self, ask: Ask) -> list[int]:
        """After its budget the end of the reasoning is forced, from as much of it on as the output ends with."""
        if ask.budget is None:
            return expected_tokens(ask.prompt, ask.max_tokens, VOCAB_SIZE)
        reasoning, tokens = Reasoning(self._marks, ask.prompt), list[int]()
        while len(tokens) < ask.max_tokens:
            is_used_up = reasoning.is_inside and reasoning.num_tokens >= ask.budget
            (drawn,) = expected_tokens(ask.prompt + tokens, 1, VOCAB_SIZE)
            tokens.append(reasoning.next_of_end if is_used_up else drawn)
            reasoning.feed(tokens[-1:])
        return tokens

    def allows(self, prompt: list[int], expected: list[int], token: int) -> bool:
        return False


class ModelExpectation:
    """Of a real model in float32: identical in the sense of ``tests/parity/identical.py``."""

    def __init__(self, model: Path) -> None:
        # Imported here: the hash worker's schedules need no torch.
        from tests.parity.engine import Engine

        self._path = model
        self._engine = Engine(model)

    def tokens(self, asks: Sequence[Ask]) -> list[list[int]]:
        return self._engine.generate([ask.prompt for ask in asks], [ask.max_tokens for ask in asks])

    def allows(self, prompt: list[int], expected: list[int], token: int) -> bool:
        """A near tie: the reference's logits of the two are less than 1e-4 apart."""
        import torch
        import transformers

        from tests.parity.identical import MAX_GAP

        model = transformers.AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + expected[:-1]])).logits[0, -1]
        gap = float(logits[expected[-1]] - logits[token])
        print(f"near tie: prompt of {len(prompt)} tokens, output position {len(expected) - 1}: {gap:.1e}")
        return abs(gap) < MAX_GAP


def expectation(worker: str) -> Expectation:
    """For engines with this worker and the demo model."""
    return HashExpectation() if worker == "hash" else ModelExpectation(DEMO_MODEL)
