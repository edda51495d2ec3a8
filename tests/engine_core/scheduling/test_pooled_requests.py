"""Pooling requests in the core: chunked, preempted, ahead of time, next to requests that generate."""

import numpy as np
import pytest

from tests.engine_core.helpers import finish, make_core, make_pooling, make_request, tokens_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.core_params import LateInteraction, PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, ErrorKind, FinishReason

PROMPT = list(range(20, 50))


def pool(core: EngineCore, *requests: EngineCoreRequest) -> list[EngineCoreOutput]:
    for request in requests:
        core.add_request(request)
    outputs = finish(core)
    assert all(len(outputs[request.request_id]) == 1 for request in requests)
    return [outputs[request.request_id][0] for request in requests]


@pytest.mark.parametrize("settings", [{}, {"budget": 8}, {"budget": 8, "async_scheduling": True}, {"caching": False}])
@pytest.mark.parametrize("task", [task for task in PoolingTask if task is not PoolingTask.ALIGN])
def test_result_depends_on_nothing_but_the_prompt(task: PoolingTask, settings: dict[str, object]) -> None:
    [expected] = pool(make_core(), make_pooling("a", PROMPT, task))
    core = make_core(**settings)
    first, second = pool(core, make_pooling("a", PROMPT, task), make_pooling("b", PROMPT, task))
    [third] = pool(core, make_pooling("c", PROMPT, task))
    for output in (first, second, third):
        assert output.finish_reason is FinishReason.STOP
        assert not output.new_token_ids
        assert output.pooled is not None
        assert expected.pooled is not None
        np.testing.assert_array_equal(output.pooled, expected.pooled)
    assert core.scheduler.kv.pool.num_free == 64
    assert not core.scheduler.requests


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_of_other_requests_stay_the_same(async_scheduling: bool) -> None:
    settings = {"budget": 8, "num_blocks": 18, "reserve_full_prompt": False, "async_scheduling": async_scheduling}
    texts = [make_request(str(index), PROMPT[index:], 20) for index in range(4)]
    alone = make_core(**settings)
    for text in texts:
        alone.add_request(text)
    expected = {request_id: tokens_of(outputs) for request_id, outputs in finish(alone).items()}
    core = make_core(**settings)
    for index, text in enumerate(texts):
        core.add_request(text)
        core.add_request(make_pooling(f"p{index}", PROMPT[-index:] * 2, PoolingTask.TOKEN_EMBED))
    outputs = finish(core)
    assert core.scheduler.stats().num_preemptions
    for request_id, tokens in expected.items():
        assert tokens_of(outputs[request_id]) == tokens
    assert outputs["p3"][0].pooled is not None
    assert outputs["p3"][0].pooled.shape == (6, 8)


def test_last_token_uses_the_prefix_cache_and_token_vectors_do_not() -> None:
    core = make_core()
    pool(core, make_pooling("a", PROMPT))
    [last, by_token] = pool(core, make_pooling("b", PROMPT), make_pooling("c", PROMPT, PoolingTask.TOKEN_EMBED))
    assert last.prefill_stats is not None
    assert last.prefill_stats.num_cached_tokens == 28
    assert by_token.prefill_stats is not None
    assert by_token.prefill_stats.num_cached_tokens == 0


def test_dimensions_and_activation() -> None:
    [whole, raw, short] = pool(
        make_core(),
        make_pooling("a", PROMPT),
        make_pooling("b", PROMPT, use_activation=False),
        make_pooling("c", PROMPT, dimensions=3),
    )
    assert whole.pooled is not None
    assert raw.pooled is not None
    assert short.pooled is not None
    assert np.linalg.norm(whole.pooled) == pytest.approx(1)
    np.testing.assert_allclose(raw.pooled / np.linalg.norm(raw.pooled), whole.pooled, rtol=1e-6)
    np.testing.assert_allclose(raw.pooled[:3] / np.linalg.norm(raw.pooled[:3]), short.pooled, rtol=1e-6)


def test_prompt_may_fill_the_context() -> None:
    core = make_core(max_model_len=30)
    [whole, longer] = pool(core, make_pooling("a", PROMPT), make_pooling("b", [*PROMPT, 1]))
    assert whole.finish_reason is FinishReason.STOP
    assert longer.error == "prompt has 31 tokens; the context holds 30"


def test_late_interaction_scores_documents_until_the_last() -> None:
    core, task = make_core(), PoolingTask.TOKEN_EMBED
    documents = [PROMPT[5:10], PROMPT[3:20]]
    query, *vectors = [
        output.pooled
        for output in pool(core, *(make_pooling(str(n), ids, task) for n, ids in enumerate([PROMPT[:4], *documents])))
    ]
    expected = [(query @ each.T).max(axis=1).sum() for each in vectors if query is not None and each is not None]
    [held] = pool(core, make_pooling("q", PROMPT[:4], task, late_interaction=LateInteraction("x", 2)))
    assert held.pooled is not None
    assert held.pooled.shape == (0,)
    part = LateInteraction("x")
    scored = pool(core, *(make_pooling(f"d{n}", ids, task, late_interaction=part) for n, ids in enumerate(documents)))
    assert [float(output.pooled) for output in scored if output.pooled is not None] == pytest.approx(expected)
    [lost] = pool(core, make_pooling("d", PROMPT, task, late_interaction=part))
    assert lost.finish_reason is FinishReason.ERROR
    assert lost.error_kind is ErrorKind.QUERY_LOST
