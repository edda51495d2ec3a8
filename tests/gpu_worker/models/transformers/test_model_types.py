"""Some of the model types that ``make models-docs`` tries: the committed table says what is found here."""

from pathlib import Path

import pytest

from tests.soak.models.models_page import reason_of
from tests.soak.models.preflight_fuzz import compare
from tests.soak.models.transformers_models import KINDS, try_kind
from tokenloom.gpu_worker.checkpoint.module_types import transformers_types

IDENTICAL = ["phi", "phimoe", "gemma", "olmo2", "mixtral", "cohere2", "starcoder2", "glm4", "granite", "lfm2", "bamba"]
SEEDS = range(8)
"""Of random checkpoints; `python -m tests.soak.models.preflight_fuzz` tries more."""


@pytest.mark.parametrize("kind", IDENTICAL)
def test_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    outcome = try_kind(kind, tmp_path)
    assert outcome.verdict == "identical"
    assert committed(kind) == ""
    types = transformers_types()
    assert types is not None
    assert types["states"].get(kind, 0) == outcome.state_chunk


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("diffllama", "DiffLlamaForCausalLM is not supported: it attends 4 times in 2 layers"),
        ("bloom", "BloomForCausalLM is not supported: it computes attention or state by itself"),
        ("roberta", "RobertaForCausalLM is not supported: it numbers positions in its own way"),
        ("rwkv", "RwkvForCausalLM is not supported: it keeps a state that transformers' cache does not hold"),
        ("zamba", "ZambaForCausalLM is not supported: it restarts its state from zero"),
    ],
)
def test_is_refused_by_name_before_the_first_request(kind: str, reason: str, tmp_path: Path) -> None:
    outcome = try_kind(kind, tmp_path)
    assert outcome.verdict == "refused"
    assert reason in outcome.reason
    assert committed(kind) == reason_of(outcome)


def committed(kind: str) -> str:
    types = transformers_types()
    if types is None:
        pytest.skip("the table has another version of transformers: run `make models-docs`")
    name, answer = types["types"][kind]
    assert name == KINDS[kind]
    return answer


@pytest.mark.parametrize("seed", SEEDS)
def test_preflight_and_engine_agree(seed: int, tmp_path: Path) -> None:
    verdict, text = compare(seed, tmp_path)
    assert verdict != "disagreement", text
