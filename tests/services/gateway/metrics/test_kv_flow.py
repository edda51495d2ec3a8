"""Prompts whose KV blocks moved between engines are counted by the pair of engines."""

from tokenloom.services.gateway.metrics.gateway_metrics import MAX_LINKS, KvFlow
from tokenloom.v1 import output_processor_pb2, types_pb2


def finished(prefill: str, decode: str, sample: int = 0) -> output_processor_pb2.RequestFinished:
    timeline = types_pb2.Timeline(prefill_engine=prefill, decode_engine=decode, kv_transfer_ns=5)
    return output_processor_pb2.RequestFinished(
        prompt_tokens=10, cached_tokens=4, sample_index=sample, timeline=timeline
    )


def test_prompts_that_moved_are_counted() -> None:
    flow = KvFlow()
    for each in (finished("a", "b"), finished("a", "b"), finished("a", "b", sample=1), finished("a", "a")):
        flow.add(each)
    assert (flow.num_prompt_tokens, flow.num_cached_tokens) == (30, 12)
    ((pair, link),) = flow.links.items()
    assert (pair, link.num_prompts, link.num_tokens, link.wait_ns) == (("a", "b"), 2, 20, 10)


def test_the_least_recent_pair_is_dropped() -> None:
    flow = KvFlow()
    for number in range(MAX_LINKS):
        flow.add(finished("a", str(number)))
    flow.add(finished("a", "0"))
    flow.add(finished("a", "new"))
    assert len(flow.links) == MAX_LINKS
    assert ("a", "0") in flow.links
    assert ("a", "1") not in flow.links
