"""The offline API gives the tokens of transformers too: nothing between prompt and engine changes them."""

import pytest

from tests.parity.identical import assert_identical
from tokenloom import LLM, SamplingParams


@pytest.mark.parametrize("reference", ["demo"], indirect=True)
def test_generate(reference):
    llm = LLM(reference.path, dtype="float32", max_model_len=1024)

    def generate(prompts, max_tokens):
        params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in max_tokens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    assert_identical(reference.cases, generate)
