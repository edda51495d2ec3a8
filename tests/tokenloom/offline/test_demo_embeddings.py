"""The demo model's embedding head finds the answer to a question, next to generation."""

from collections.abc import Iterator

import numpy as np
import pytest

from tokenloom import LLM, PoolingParams, SamplingParams
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is a token?": "A token is a small piece of text, such as a word or a part of a word.",
    "What is 8 + 9?": "8 + 9 = 17.",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(DEMO_MODEL_NAME, num_kv_blocks=64, max_num_seqs=4)
    yield llm
    llm.close()


@pytest.mark.parametrize("dimensions", [128, 64])
def test_the_nearest_answer_is_the_right_one(llm: LLM, dimensions: int) -> None:
    def vectors(texts: list[str]) -> np.ndarray:
        outputs = llm.embed(texts, use_tqdm=False, pooling_params=PoolingParams(dimensions=dimensions))
        return np.array([output.outputs.embedding for output in outputs])

    questions, answers = vectors(list(ANSWERS)), vectors(list(ANSWERS.values()))
    assert questions.shape == (4, dimensions)
    assert np.linalg.norm(answers, axis=1) == pytest.approx(1.0)
    assert (questions @ answers.T).argmax(axis=1).tolist() == [0, 1, 2, 3]


def test_the_model_still_generates(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
