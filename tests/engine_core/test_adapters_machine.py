"""Loads, names, pins and unloads adapters at random: a batch never has too many, and every request begins in time."""

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from tests.engine_core.adapter_dirs import make_adapter
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, make_worker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.messages import EngineCoreRequest, ErrorKind
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.scheduling.adapters import MAX_PASSES
from tokenloom.request.adapter_names import adapter_salt

NAMES = "abcde"
MAX_SEQS = 4


class AdaptersMachine(RuleBasedStateMachine):
    """An engine core over the hash worker, which asserts that each computed request has its adapter in a slot."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.paths = {name: Path(self._directory.name, name) for name in NAMES}
        self.digests = {name: make_adapter(path) for name, path in self.paths.items()}
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.waiting: dict[str, set[str]] = {}
        """By request that has not begun: those with an adapter that arrived after it and have begun."""

    @initialize(max_loras=st.integers(1, 3), policy=st.sampled_from(["fcfs", "priority"]), is_async=st.booleans())
    def start(self, max_loras: int, policy: str, is_async: bool) -> None:
        lora = LoraConfig(enable=True, max_loras=max_loras, max_cpu_loras=4)
        config = make_config(num_blocks=24, max_num_seqs=MAX_SEQS, policy=policy, async_scheduling=is_async)
        config = replace(config, lora=lora)
        self.max_loras = max_loras
        self.core = EngineCore(config, UniProcExecutor(make_worker(config)))

    @rule(name=st.sampled_from(NAMES), in_place=st.booleans())
    def load(self, name: str, in_place: bool) -> None:
        self.core.adapters.load(name, str(self.paths[name]), in_place=in_place)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.core.adapters.unload(name)

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.core.adapters.pin(name, pinned)

    @rule(
        names=st.lists(st.sampled_from(["", *NAMES]), min_size=1, max_size=12),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 6),
        tenant=st.sampled_from(["", "other"]),
    )
    def add(self, names: list[str], length: int, max_tokens: int, tenant: str) -> None:
        for name in names:
            request_id, adapter = str(len(self.requests)), self.digests.get(name, b"")
            request = make_request(request_id, range(length), max_tokens, tenant=tenant)
            request.adapter, request.cache_salt = adapter, adapter_salt(b"", adapter)
            self.requests[request_id], self.tokens[request_id] = request, []
            self.core.add_request(request)
            if request_id in self.core.scheduler.requests:
                self.waiting[request_id] = set()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def abort_one(self) -> None:
        if self.core.scheduler.requests:
            request_id = next(iter(self.core.scheduler.requests))
            self.core.abort_requests([request_id])
            self.waiting.pop(request_id, None)
            self.requests[request_id] = None  # type: ignore[assignment]

    @invariant()
    def no_batch_has_too_many(self) -> None:
        if hasattr(self, "core"):
            running = {request.adapter for request in self.core.scheduler.running} - {b""}
            assert len(running) <= self.max_loras

    def teardown(self) -> None:
        if hasattr(self, "core"):
            for _ in range(20_000):
                if not self.core.has_work():
                    break
                self._step()
            assert not self.core.scheduler.requests, "a request never began"
            assert not self.core.adapters._requests
            self._check_tokens()
        self._directory.cleanup()

    def _step(self) -> None:
        if not self.core.has_work():
            return
        for output in self.core.step().outputs:
            if output.error:
                assert output.error_kind is ErrorKind.NO_ADAPTER
                self.requests[output.request_id] = None  # type: ignore[assignment]
                self.waiting.pop(output.request_id, None)
            self.tokens[output.request_id] += output.new_token_ids
        for request in self.core.scheduler.running:
            self._begins(request.request_id)

    def _begins(self, request_id: str) -> None:
        if self.waiting.pop(request_id, None) is None:
            return
        request = self.requests[request_id]
        if not request.adapter:
            return
        for other, passed in self.waiting.items():
            waiter = self.requests[other]
            if waiter.adapter != request.adapter and int(other) < int(request_id) and waiter.tenant == request.tenant:
                passed.add(request_id)
                # Those of the adapters whose requests wait before it begin first, and are passed as often.
                limit = (MAX_PASSES + MAX_SEQS) * len(NAMES)
                assert len(passed) <= limit, Counter(self.requests[each].adapter[:1] for each in passed)

    def _check_tokens(self) -> None:
        for request_id, request in self.requests.items():
            if request is not None:
                count = request.sampling_params.max_tokens
                expected = expected_tokens(request.prompt_token_ids, count, VOCAB_SIZE, request.adapter)
                assert self.tokens[request_id] == expected


TestAdapters = AdaptersMachine.TestCase
TestAdapters.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
