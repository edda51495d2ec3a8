"""Prefill and decode engines in two processes on one GPU: the tokens of one engine, with KV that moved."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import CPU, GPU, Target
from tests.gpu_worker.kv_connector.engine_pair import Engine, apart, uni
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVRelease, KVTarget, KVVerdict, KVVerify
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports

_PARAMS = CoreSamplingParams(max_tokens=16, seed=3, temperature=0.9, top_p=0.9)
_LENGTHS = (1, 16, 33, 100)
_START_SECONDS = 60.0


def run(rows: Rows, target: Target = GPU) -> None:
    prompts = {f"{length}": [(length * 13 + i * i * 7) % 400 + 5 for i in range(length)] for length in _LENGTHS}
    alone, expected = _engine(target, []), {}
    for name, prompt in prompts.items():
        alone.add(name, prompt, _PARAMS)
        expected[name] = [token for output in alone.run(name) for token in output.new_token_ids]
    alone.core.shutdown()
    wrong = []
    for transport in target.pick(("cuda", "shm"), ("shm",)):
        with _prefill(target, transport) as connection:
            decode = _engine(target, [transport], role="decode")
            found = {name: _ask(connection, decode, name, prompt) for name, prompt in prompts.items()}
            blocks = decode.core.scheduler.stats().kv_blocks_received
            decode.core.shutdown()
        different = sum(found[name] != tokens for name, tokens in expected.items())
        rows.add(f"prefill and decode, {transport}", requests=len(found), different=different, blocks_moved=blocks)
        wrong += [transport] if different or not blocks else []
    if wrong:
        raise SystemExit(f"prefill and decode differ from one engine: {', '.join(wrong)}")


def _engine(target: Target, transports: list[str], **options: Any) -> Engine:
    return Engine(make_transports(transports, on_host=False), uni if target.has_gpu else apart, **options)


@contextlib.contextmanager
def _prefill(target: Target, transport: str) -> Iterator[Connection]:
    """Provide a connection to the process of a prefill engine."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, target.is_tiny, transport), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it
    try:
        if not ours.poll(_START_SECONDS):
            raise RuntimeError("the prefill engine did not start in time")
        ours.recv()
        yield ours
    finally:
        ours.close()
        process.join(5)
        process.kill()


def _serve(connection: Connection, is_tiny: bool, transport: str) -> None:
    """Compute prompts and answer what decode engines ask, until the connection ends."""
    engine = _engine(CPU if is_tiny else GPU, [transport], role="prefill")
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            if isinstance(call, (KVAcquire, KVRelease)):
                connection.send(engine.answer(call))
                continue
            name, prompt = call
            engine.add(name, prompt, _PARAMS, lease_id=name.encode())
            connection.send([token for output in engine.run(name) for token in output.new_token_ids])
    engine.core.shutdown()


def _ask(connection: Connection, decode: Engine, name: str, prompt: list[int]) -> list[int]:
    """Return the tokens of a request, of which the prefill engine draws the first one."""

    def call(message: object) -> Any:
        connection.send(message)
        return connection.recv()

    def verify() -> None:
        assert decode.service is not None
        decode.service.run()
        for event in decode.service.take_events():
            assert isinstance(event, KVVerify)
            said = call(KVRelease(2, target.acquisition_id, target.generations))
            decode.service.receive(KVVerdict(event.request_id, said.valid, said.failure, said.checksums))
            decode.service.run()

    first = call((name, prompt))
    layout, transport = decode.core.ready.kv_layout, decode.transport
    target: KVTarget = call(KVAcquire(1, name.encode(), layout, prompt_digest(prompt, b""), [transport])).target
    decode.add(name, prompt, _PARAMS, accepted_token_ids=first, remote_kv=target)
    outputs = decode.run(name, verify)
    return first + [token for output in outputs for token in output.new_token_ids]
