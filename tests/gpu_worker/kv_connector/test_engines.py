"""Prefill and decode on two engines with a real model, joined by each transport: not a token may change."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenloom import demo_model
from tokenloom.engine_core.config import CacheConfig, EngineConfig, KVConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.kv_messages import KVAcquire, KVAnswer, KVRelease, KVTarget, KVVerdict, KVVerify
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport
from tokenloom.gpu_worker.platform.devices import CPUWorker

MODEL = str(Path(demo_model.__file__).parent)
MAKE: dict[str, Callable[[], list[KVTransport]]] = {
    "shm": lambda: make_transports(["shm"]),
    "unix": lambda: make_transports(["socket"]),
    "tcp": lambda: [SocketTransport("127.0.0.1:0")],
    "nixl": lambda: make_transports(["nixl"]),
}
LENGTHS = (1, 15, 16, 17, 33, 100, 400)
GREEDY = SamplingParams(max_tokens=12, seed=3, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, seed=3, temperature=0.9, top_p=0.9, frequency_penalty=0.3)


class Engine:
    """A core, and who waits for it."""

    def __init__(self, transports: list[KVTransport], **kv: Any) -> None:
        names = tuple(transport.name for transport in transports)
        config = EngineConfig(
            worker=WorkerConfig(model=MODEL, dtype="float32"),
            cache=CacheConfig(num_blocks=120),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
            kv=KVConfig(transports=names, checksum=True, **kv),
        )
        self.transport = names[0] if names else ""
        kv_parts = make_core_kv(config, transports)
        self.service = kv_parts.service if kv_parts else None
        self.core = EngineCore(config, UniProcExecutor(CPUWorker(config)), kv_parts)
        self.news = threading.Event()
        self.core.on_news(self.news.set)
        if self.service is not None:
            self.service.on_wake = self.news.set

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, **extra: Any) -> None:
        self.core.add_request(EngineCoreRequest(request_id, prompt, params, **extra))

    def run(self, request_id: str, meanwhile: Callable[[], None] = lambda: None) -> list[EngineCoreOutput]:
        """Until the request ends; all its outputs."""
        outputs: list[EngineCoreOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            self.news.clear()
            meanwhile()
            if self.core.has_work():
                found = self.core.step().outputs
                outputs += [output for output in found if output.request_id == request_id and output.new_token_ids]
            else:
                assert self.news.wait(10), "nobody has anything to do"
        return outputs

    def answer(self, call: KVAcquire | KVRelease) -> KVAnswer:
        """As the KV thread would."""
        assert self.service is not None
        self.service.receive(call)
        while True:
            self.news.clear()
            self.service.run()
            for event in self.service.take_events():
                assert isinstance(event, KVAnswer)
                return event
            assert self.news.wait(10), "no answer"


class Pair:
    """Two engines, and what their fronts do."""

    def __init__(self, make: Callable[[], list[KVTransport]], **kv: Any) -> None:
        self.prefill, self.decode = Engine(make(), role="prefill", **kv), Engine(make(), role="decode", **kv)

    def ask(self, request_id: str, prompt: list[int], params: SamplingParams) -> list[int]:
        """The whole road of a request; its tokens."""
        self.prefill.add(request_id, prompt, params, lease_id=request_id.encode())
        (output,) = self.prefill.run(request_id)
        assert output.finish_reason is FinishReason.PREFILLED
        layout, digest = self.decode.core.ready.kv_layout, prompt_digest(prompt, b"")
        answer = self.prefill.answer(KVAcquire(1, request_id.encode(), layout, digest, [self.prefill.transport]))
        assert answer.target is not None, answer
        self.decode.add(request_id, prompt, params, accepted_token_ids=output.new_token_ids, remote_kv=answer.target)
        outputs = self.decode.run(request_id, lambda: self._verify(answer.target))
        return output.new_token_ids + [token for output in outputs for token in output.new_token_ids]

    def _verify(self, target: KVTarget | None) -> None:
        service = self.decode.service
        assert service is not None
        assert target is not None
        service.run()
        for event in service.take_events():
            assert isinstance(event, KVVerify)
            released = self.prefill.answer(KVRelease(2, target.acquisition_id, target.generations))
            service.receive(KVVerdict(event.request_id, released.valid, released.failure, released.checksums))
            service.run()

    def close(self) -> None:
        self.prefill.core.shutdown()
        self.decode.core.shutdown()


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    pairs = []

    def make(transport: str, **kv: Any) -> Pair:
        pairs.append(Pair(MAKE[transport], **kv))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prompt_of(length: int) -> list[int]:
    return [(length * 13 + i * i * 7) % 400 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[[int, SamplingParams], list[int]]]:
    """What one engine does alone; each asked for once."""
    engine, known = Engine([]), dict[tuple[int, int], list[int]]()

    def tokens(length: int, params: SamplingParams) -> list[int]:
        key = length, id(params)
        if key not in known:
            engine.core.reset_prefix_cache()
            engine.add(str(key), prompt_of(length), params)
            known[key] = [token for output in engine.run(str(key)) for token in output.new_token_ids]
        return known[key]

    yield tokens
    engine.core.shutdown()


@pytest.mark.parametrize(
    "transport",
    ["shm", "unix", "tcp", pytest.param("nixl", marks=pytest.mark.skipif(not nixl.is_available(), reason="no nixl"))],
)
def test_the_tokens_are_those_of_one_engine(
    transport: str, make_pair: MakePair, expected: Callable[[int, SamplingParams], list[int]]
) -> None:
    pair = make_pair(transport)
    for length in LENGTHS:
        for params in (GREEDY, SAMPLED):
            pair.prefill.core.reset_prefix_cache()
            pair.decode.core.reset_prefix_cache()
            assert pair.ask(f"{length}-{id(params)}", prompt_of(length), params) == expected(length, params)
    stats = pair.decode.core.scheduler.stats()
    num_blocks = 2 * sum(-(-length // 16) for length in LENGTHS)
    assert stats.kv_blocks_received == num_blocks
    assert stats.kv_bytes_received == {
        pair.prefill.transport: num_blocks * pair.decode.core.executor.kv_pool().block_bytes
    }
    assert stats.kv_recomputes == {}
    for engine in (pair.prefill, pair.decode):
        while engine.core.has_work():
            engine.core.step()
        assert engine.core.scheduler.stats().kv_usage == 0.0


def test_what_moved_can_be_hit(make_pair: MakePair, expected: Callable[[int, SamplingParams], list[int]]) -> None:
    pair = make_pair("shm")
    assert pair.ask("a", prompt_of(100), GREEDY) == expected(100, GREEDY)
    received = pair.decode.core.scheduler.stats().kv_blocks_received
    assert pair.ask("b", prompt_of(100), GREEDY) == expected(100, GREEDY)
    assert pair.decode.core.scheduler.stats().kv_blocks_received == received + 1, "only the last, partial block"


def test_an_offload_file_gives_back_what_it_took(
    tmp_path: Path, expected: Callable[[int, SamplingParams], list[int]]
) -> None:
    engine = Engine([], offload_path=str(tmp_path), offload_bytes=64 << 20)
    for request_id, length in (("a", 400), ("b", 1800), ("c", 400)):
        engine.add(request_id, prompt_of(length), GREEDY)
        tokens = [token for output in engine.run(request_id) for token in output.new_token_ids]
        if length == 400:
            assert tokens == expected(400, GREEDY)
    stats = engine.core.scheduler.stats()
    assert stats.kv_bytes_received["offload"] > 0
    assert stats.kv_recomputes == {}
    engine.core.shutdown()


def test_pulling_and_offloading_go_together(
    tmp_path: Path, make_pair: MakePair, expected: Callable[[int, SamplingParams], list[int]]
) -> None:
    pair = make_pair("shm", offload_path=str(tmp_path), offload_bytes=64 << 20)
    lengths = (400, 1500, 701, 400, 1500)
    for number, length in enumerate(lengths):
        assert pair.ask(str(number), prompt_of(length), GREEDY) == expected(length, GREEDY)
    prefill, decode = (engine.core.scheduler.stats() for engine in (pair.prefill, pair.decode))
    assert prefill.kv_bytes_received["offload"] > 0, "a prompt that comes again is not computed again"
    assert decode.kv_bytes_received["shm"] > 0
    assert prefill.kv_recomputes == decode.kv_recomputes == {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
