"""Counts cached prompt tokens, and the prompts whose KV blocks moved from one engine to another."""

from dataclasses import dataclass

from tokenloom.v1 import output_processor_pb2

MAX_LINKS = 256
"""Limits the pairs of engines that are remembered; the one that was used least recently is dropped."""


@dataclass(slots=True)
class KvLink:
    """Sums up what one engine sent to another.

    Attributes:
        num_prompts: Prompts that one engine computed and the other one continued.
        num_tokens: The tokens of these prompts.
        wait_ns: Nanoseconds for which the requests waited for the KV blocks.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    wait_ns: int = 0


class KvFlow:
    """Records finished requests of this gateway.

    Attributes:
        num_prompt_tokens: Tokens of the prompts of finished requests.
        num_cached_tokens: Those that were in a prefix cache.
        links: By the engine that computed the prompts and the engine that continued them, in the order of last use.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.links: dict[tuple[str, str], KvLink] = {}

    def add(self, finished: output_processor_pb2.RequestFinished) -> None:
        """Count a prompt. Its further samples share what the first one computed, and are not counted."""
        if finished.sample_index:
            return
        self.num_prompt_tokens += finished.prompt_tokens
        self.num_cached_tokens += finished.cached_tokens
        source, target = finished.timeline.prefill_engine, finished.timeline.decode_engine
        if source and target and source != target:
            self._add_link(source, target, finished)

    def _add_link(self, source: str, target: str, finished: output_processor_pb2.RequestFinished) -> None:
        link = self.links.pop((source, target), None) or KvLink()
        self.links[source, target] = link
        if len(self.links) > MAX_LINKS:
            del self.links[next(iter(self.links))]
        link.num_prompts += 1
        link.num_tokens += finished.prompt_tokens
        link.wait_ns += finished.timeline.kv_transfer_ns
