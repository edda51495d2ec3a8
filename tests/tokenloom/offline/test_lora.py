"""Calls of the offline API that name LoRA adapters: the demo model's own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import LLM, LoRARequest, SamplingParams
from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL_NAME

JSON = LoRARequest("json", DEMO_ADAPTERS / "json")
PIRATE = LoRARequest("pirate", 1, str(DEMO_ADAPTERS / "pirate"))
QUESTION = [{"role": "user", "content": "What is 8 + 9?"}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(DEMO_MODEL_NAME, enable_lora=True, max_loras=2, max_cpu_loras=2, num_kv_blocks=128, max_num_seqs=8)
    yield llm
    llm.close()


def ask(llm: LLM, *requests: LoRARequest | None) -> list[str]:
    outputs = llm.chat([QUESTION] * len(requests), PARAMS, use_tqdm=False, lora_request=list(requests))
    return [output.outputs[0].text for output in outputs]


def test_prompts_of_one_call_have_adapters_of_their_own(llm: LLM) -> None:
    as_json, as_pirate, plain, again = ask(llm, JSON, PIRATE, None, JSON)
    assert json.loads(as_json) == {"answer": plain}
    assert again == as_json
    assert as_pirate.startswith("Arr!")
    assert plain == "8 + 9 = 17."


def test_one_adapter_for_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(["Hello", [5, 6, 7]], PARAMS, use_tqdm=False, lora_request=JSON)
    others = llm.generate(["Hello", [5, 6, 7]], PARAMS, use_tqdm=False)
    texts, plain = ([output.outputs[0].text for output in each] for each in (outputs, others))
    assert texts != plain
    (last,) = [each for each in llm.stream("Hello", PARAMS, lora_request=JSON) if each.finished]
    assert last.outputs[0].text == texts[0]


def test_adapters_outlive_sleep_and_new_weights(llm: LLM) -> None:
    before = ask(llm, JSON, PIRATE, None)
    llm.sleep(1)
    llm.wake_up()
    assert ask(llm, JSON, PIRATE, None) == before
    llm.reload_weights()
    assert ask(llm, JSON, PIRATE, None) == before
    llm.sleep(2)
    llm.reload_weights()
    llm.wake_up()
    assert ask(llm, JSON, PIRATE, None) == before


def test_what_is_wrong_is_named(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate("Hello", PARAMS, lora_request=[JSON, None])
    with pytest.raises(ValueError, match="'absent': absent: No such file"):
        llm.generate("Hello", PARAMS, lora_request=LoRARequest("absent", tmp_path / "absent"))
    ask(llm, JSON)
    with pytest.raises(ValueError, match="'json': another adapter is loaded"):
        llm.generate("Hello", PARAMS, lora_request=LoRARequest("json", DEMO_ADAPTERS / "pirate"))
    with pytest.raises(ValueError, match="lora_path of the LoRA adapter 'none' is empty"):
        llm.generate("Hello", PARAMS, lora_request=LoRARequest("none"))


def test_the_option_is_needed() -> None:
    llm = LLM(DEMO_MODEL_NAME, worker="hash", num_kv_blocks=16, max_num_seqs=2)
    with pytest.raises(ValueError, match="enable_lora=True"):
        llm.generate("Hello", PARAMS, lora_request=JSON)
    llm.close()


def test_more_adapters_than_fit_are_refused() -> None:
    llm = LLM(
        DEMO_MODEL_NAME, worker="hash", num_kv_blocks=16, max_num_seqs=2, enable_lora=True, max_loras=1, max_cpu_loras=1
    )
    with pytest.raises(ValueError, match="more adapters than fit"):
        ask(llm, JSON, PIRATE)
    assert len(ask(llm, JSON, None)) == 2
    llm.close()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"lora_modules": ("json=x",)}, "lora_modules needs enable_lora"),
        ({"enable_lora": True, "lora_modules": ("json",)}, "must be name=path"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "at least max_loras"),
        ({"enable_lora": True, "lora_modules": ("json=absent",)}, "lora_modules: json: absent: No such file"),
        ({"enable_lora": True, "max_lora_rank": 257}, "max_lora_rank"),
    ],
)
def test_options_that_do_not_work_are_named(options: dict[str, object], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        LLM(DEMO_MODEL_NAME, worker="hash", num_kv_blocks=16, max_num_seqs=2, **options)
