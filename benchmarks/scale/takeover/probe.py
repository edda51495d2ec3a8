"""Shows whether a coordinator counts picks of the one before it."""

import asyncio
import time

from tokenloom.services.coordinator.engines.engine_record import PICK_SECONDS
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState, PickRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

from ..meter import Meter
from ..patient_channels import PatientChannels

_NAME = "probe"
_PICKS = 8
_TRIES = 10
_MODEL = Fingerprint(model=_NAME, tokenizer=b"p" * 32, block_size=16)
_ASK = PickRequest(fingerprint=_MODEL, role=EngineRole.ENGINE_ROLE_PREFILL, prompt_tokens=10)
_IDENTITY = EngineIdentity(
    engine_id=_NAME,
    epoch=1,
    address="probe.invalid:1",
    fingerprint=_MODEL,
    limits=ModelLimits(max_model_len=1024),
    num_kv_blocks=64,
)


async def picks_counted(meter: Meter, address: str, old_epoch: int) -> int:
    """Return how many picks of the coordinator with ``old_epoch`` the one at ``address`` takes for its own.

    An engine of its own joins, gets picks, and reports that picks of the former coordinator have arrived that have the
    same numbers. Each of the new ones waits still, unless an old one was counted. Raises ``TimeoutError`` if the
    machine is too slow to see that before the picks expire.
    """
    for _ in range(_TRIES):
        async with PatientChannels().open(address, "coordinator") as channel:
            began = time.monotonic()
            waiting = await _waiting_after_old_picks(CoordinatorStub(channel), meter, old_epoch)
            if time.monotonic() < began + PICK_SECONDS:
                return _PICKS - waiting
            await asyncio.sleep(PICK_SECONDS)  # until the next try's are the only ones
    raise TimeoutError(f"the picks of {_NAME!r} were never shown within {PICK_SECONDS:g} s")


async def _waiting_after_old_picks(
    stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", meter: Meter, old_epoch: int
) -> int:
    call = stub.Join()
    try:
        await call.write(_report(hello=make_hello(_NAME, 1), identity=_IDENTITY))
        await call.read()  # it has joined
        numbers = [(await stub.Pick(_ASK)).pick.number for _ in range(_PICKS)]
        old = [PickId(coordinator_epoch=old_epoch, number=number) for number in numbers]
        await call.write(_report(picks_arrived=old, running=1))
        await meter.until(lambda view: (shown := _shown(view)) is not None and shown.report.running == 1)
        shown = _shown(meter.view)
        assert shown is not None
        return shown.waiting
    finally:
        call.cancel()


def _report(**fields: object) -> EngineReport:
    role, state = EngineRole.ENGINE_ROLE_BOTH, EngineState.ENGINE_STATE_SERVING
    return EngineReport(role=role, state=state, free_kv_blocks=64, **fields)  # type: ignore[arg-type]


def _shown(view: RegistryView) -> EngineEntry | None:
    return next((entry for entry in view.engines if entry.identity.engine_id == _NAME), None)
