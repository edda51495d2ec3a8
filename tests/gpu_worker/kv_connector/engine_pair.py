"""Two engines with a real model or a hash worker, and what their fronts do to move KV between them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tests.gpu_worker.platform.device_platform import ApartPlatform
from tokenloom import demo_model
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVCacheDtype,
    KVConfig,
    LoraConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer, KVRelease, KVTarget, KVVerdict, KVVerify
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.services.engine.core.workers import WORKER_COMMAND, make_worker

MODEL = str(Path(demo_model.__file__).parent)
MakeTransports = Callable[[], list[KVTransport]]
MakeExecutor = Callable[[EngineConfig], Executor]
MAKE: dict[str, MakeTransports] = {
    "cuda": lambda: make_transports(["cuda"]),
    "shm": lambda: make_transports(["shm"]),
    "unix": lambda: make_transports(["socket"]),
    "tcp": lambda: [SocketTransport("127.0.0.1:0")],
    "nixl": lambda: make_transports(["nixl"]),
}


def uni(config: EngineConfig) -> Executor:
    """Run the worker in this process."""
    return UniProcExecutor(make_worker(config))


def apart(config: EngineConfig) -> Executor:
    """Run the worker in this process, on a device apart from the host."""
    return UniProcExecutor(ModelWorker(config, ApartPlatform()))


def mp(config: EngineConfig, world_size: int = 1) -> Executor:
    """Run each worker in a process of its own."""
    return MultiprocExecutor(config, WORKER_COMMAND, world_size=world_size)


def tier(label: str, folder: Path) -> dict[str, Any]:
    """Options of a tier by the label of its transfers: ``offload``, the file of one engine, or ``folder``, that engines
    share."""
    if label == "folder":
        return {"store": folder.as_uri(), "store_bytes": 64 << 20, "store_timeout_seconds": 30.0}
    return {"offload_path": str(folder), "offload_bytes": 64 << 20}


class Engine:
    """A core, and who waits for it."""

    def __init__(
        self,
        transports: list[KVTransport],
        make_executor: MakeExecutor = uni,
        worker: Literal["model", "hash"] = "model",
        kv_cache_dtype: KVCacheDtype = "auto",
        model: str = MODEL,
        num_blocks: int = 120,
        speculative: SpeculativeConfig | None = None,
        lora: LoraConfig | None = None,
        **kv: Any,
    ) -> None:
        names = tuple(transport.name for transport in transports)
        config = EngineConfig(
            worker=WorkerConfig(model=model, dtype="float32", num_threads=1, worker=worker),
            cache=CacheConfig(num_blocks=num_blocks, dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
            kv=KVConfig(transports=names, **{"checksum": True, **kv}),
            speculative=speculative,
            lora=lora or LoraConfig(),
        )
        self.transport = names[0] if names else ""
        kv_parts = make_core_kv(config, transports)
        self.service = kv_parts.service if kv_parts else None
        self.core = EngineCore(config, make_executor(config), kv_parts)
        self.core.scheduler.share_kv(model.encode())
        self.news = threading.Event()
        self.core.on_update(self.news.set)
        if self.service is not None:
            self.service.on_wake = self.news.set

    def add(self, request_id: str, prompt: list[int], params: CoreSamplingParams, **extra: Any) -> None:
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
                assert self.news.wait(10), "no part has anything to do"
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

    def __init__(
        self, make: MakeTransports, prefill: MakeExecutor = uni, decode: MakeExecutor = uni, **kv: Any
    ) -> None:
        self.prefill = Engine(make(), prefill, role="prefill", **kv)
        self.decode = Engine(make(), decode, role="decode", **kv)

    def ask(self, request_id: str, prompt: list[int], params: CoreSamplingParams, adapter: bytes = b"") -> list[int]:
        """The whole road of a request; its tokens."""
        named = {"adapter": adapter, "cache_salt": adapter_salt(b"", adapter)}
        self.prefill.add(request_id, prompt, params, lease_id=request_id.encode(), **named)
        (output,) = self.prefill.run(request_id)
        assert output.finish_reason is FinishReason.PREFILLED
        layout, digest = self.decode.core.ready.kv_layout, prompt_digest(prompt, named["cache_salt"])
        answer = self.prefill.answer(KVAcquire(1, request_id.encode(), layout, digest, [self.prefill.transport]))
        assert answer.target is not None, answer
        accepted = output.new_token_ids
        self.decode.add(request_id, prompt, params, accepted_token_ids=accepted, remote_kv=answer.target, **named)
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
