"""What an engine does beside computing prompts and tokens, with a real model whose layers keep a state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.parity.engine import Engine
from tests.parity.state_checkpoints import make_model, write_model
from tests.parity.test_states import Reference, draw, free_slots
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest
from tokenloom.engine_core.data.request import RequestStatus
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

KIND = "qwen3_5_text"
PROMPT = draw(150, 1)
PARAMS = CoreSamplingParams(max_tokens=8, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(KIND, tmp_path_factory.mktemp(KIND))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    [found] = Reference(KIND).answers([PROMPT], 8)
    return found


@pytest.fixture
def engine(path: Path) -> Engine:
    return Engine(path, num_blocks=256, prefix_caching=True, budget=64)


def ask(engine: Engine, prompt: list[int] = PROMPT, params: CoreSamplingParams = PARAMS, **fields: Any) -> list[Any]:
    engine.core.add_request(EngineCoreRequest("r", prompt, params, **fields))
    outputs = list[EngineCoreOutput]()
    while engine.core.has_work():
        outputs += engine.core.step().outputs
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_sleep_and_other_weights(engine: Engine, path: Path, tokens: list[int], tmp_path: Path) -> None:
    other = make_model(KIND)
    for name, weight in other.named_parameters():
        if name.endswith("linear_attn.in_proj_qkv.weight"):
            weight.mul_(-1.5)
    other.save_pretrained(tmp_path)
    assert tokens_of(ask(engine)) == tokens
    engine.core.sleeping.sleep(1)
    engine.core.sleeping.wake_up()
    assert tokens_of(ask(engine)) == tokens
    engine.core.executor.collective_rpc("check_weights", str(tmp_path))
    engine.core.reset_prefix_cache()
    engine.core.executor.collective_rpc("reload_weights", str(tmp_path))
    changed = tokens_of(ask(engine))
    assert changed != tokens
    assert changed == tokens_of(ask(Engine(tmp_path, num_blocks=256)))
    free, all_of_them = free_slots(engine)
    assert free == all_of_them


def test_a_session_goes_on_from_its_last_turn(engine: Engine) -> None:
    spoken: list[int] = []
    reference = Reference(KIND)
    for turn in range(3):
        said = draw(60 + turn, turn)
        spoken += said
        found = tokens_of(ask(engine, said, resumable=True))
        assert [found] == reference.answers([spoken], 8)
        spoken += found[:-1]
    assert engine.core.scheduler.stats().prefix_cache_hits > 0


def test_embeddings_of_a_prompt_give_the_tokens_of_its_ids(engine: Engine, tokens: list[int]) -> None:
    rows = make_model(KIND).get_input_embeddings().weight[PROMPT[20:90]].numpy().astype(np.float32)
    for _ in range(2):
        prompt = [*PROMPT[:20], *[0] * 70, *PROMPT[90:]]
        assert tokens_of(ask(engine, prompt, prompt_embeds=[EmbedsSpan(20, rows)])) == tokens
    assert engine.core.scheduler.stats().prefix_cache_hits > 0


def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(engine: Engine, path: Path) -> None:
    params = replace(PARAMS, prompt_logprobs=1)
    found = []
    for each in (engine, engine, Engine(path, num_blocks=256)):
        [logprobs] = [
            out.new_prompt_logprobs for out in ask(each, params=params) if out.new_prompt_logprobs is not None
        ]
        found.append(logprobs.sampled)
    assert len(found[0]) == len(PROMPT) - 1
    for others in found[1:]:
        assert np.allclose(others, found[0], atol=1e-4)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_preempted_request_computes_nothing_again(path: Path, tokens: list[int], impl: Any) -> None:
    engine = Engine(path, num_blocks=256, prefix_caching=True, budget=128, model_impl=impl)
    scheduler = engine.core.scheduler
    engine.core.add_request(EngineCoreRequest("r", PROMPT, PARAMS))
    outputs, sizes, schedule = list[EngineCoreOutput](), list[int](), scheduler.schedule

    def noted() -> SchedulerOutput:
        scheduled = schedule()
        sizes.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    scheduler.schedule = noted  # type: ignore[method-assign]
    while engine.core.has_work():
        if len(tokens_of(outputs)) == 4 and scheduler.running:
            [request] = scheduler._live.take_running()
            scheduler._planner.requeue(request, RequestStatus.PREEMPTED)
            scheduler._preempted_req_ids.append("r")
        outputs += engine.core.step().outputs
    assert scheduler.stats().num_preemptions == 1
    assert sum(sizes) == len(PROMPT) + 7
    assert tokens_of(outputs) == tokens
