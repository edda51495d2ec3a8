"""The front's link to the core: what fails alone, and what ends with the core."""

from pathlib import Path

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings
from tokenloom.engine_core.data.errors import NotSentError
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.types_pb2 import FINISH_REASON_ERROR

UNSENDABLE = [9] * 13


class RefusingClient(AsyncInprocClient):
    async def add_request(self, request: EngineCoreRequest) -> None:
        if request.prompt_token_ids == UNSENDABLE:
            raise NotSentError("ADD: a message of 2000000 frames")
        await super().add_request(request)


async def test_a_request_that_cannot_be_passed_to_the_core_fails_alone(socket_dir: Path) -> None:
    settings = make_settings(socket_dir)
    config = settings.engine_config(str(DEMO_MODEL))
    service = EngineService(settings, RefusingClient(config, UniProcExecutor(HashWorker(config))))
    async with running(service, settings) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, UNSENDABLE), make_add(2, [1, 2]))
        received = await peer.read_until_finished([1, 2])
    assert received.finished[1].reason == FINISH_REASON_ERROR
    assert isinstance(wire_errors.from_proto(received.finished[1].error), errors.Internal)
    assert received.token_ids == {2: expected_tokens([1, 2], 5, VOCAB_SIZE)}
