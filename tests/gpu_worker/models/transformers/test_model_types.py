"""Twelve of the model types that ``python -m tests.soak.models.transformers_models`` tries."""

from pathlib import Path

import pytest

from tests.soak.models.transformers_models import Outcome, try_kind

IDENTICAL = ["phi", "phimoe", "gemma", "olmo2", "mixtral", "cohere2", "starcoder2", "glm4", "granite"]


@pytest.mark.parametrize("kind", IDENTICAL)
def test_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    assert try_kind(kind, tmp_path) == Outcome("identical")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("diffllama", "DiffLlamaForCausalLM is not supported: it attends 4 times in 2 layers"),
        ("bloom", "BloomForCausalLM is not supported: it computes attention or state by itself"),
        ("roberta", "RobertaForCausalLM is not supported: it numbers positions in its own way"),
        ("mamba", "MambaForCausalLM is not supported: it keeps a state between tokens"),
    ],
)
def test_is_refused_by_name_before_the_first_request(kind: str, reason: str, tmp_path: Path) -> None:
    outcome = try_kind(kind, tmp_path)
    assert outcome.verdict == "refused"
    assert reason in outcome.reason
