"""What must hold after every run, whatever went wrong in it."""

import asyncio
from collections.abc import Iterator, Sequence

from tests.engine_core.invariants import check_idle

from .expectations import is_allowed, must_complete
from .load import Answer
from .mesh import Mesh, SimulatedEngine
from .plan import Fault

SLACK_SECONDS = 0.2
"""How late a request may end after its deadline, for what is on its way."""
IDLE_SECONDS = 12.0
"""Within so many seconds after the last answer every part has given back what it held."""


def check_answers(answers: Sequence[Answer], mesh: Mesh, happened: Sequence[Fault]) -> Iterator[str]:
    """Yield what is wrong with the answers."""
    for number, answer in enumerate(answers):
        frozen_seconds = sum(mesh.parts[name].frozen_seconds for name in answer.gateways)
        if answer.error is not None and not is_allowed(answer.error, happened, answer):
            yield f"request {number}: ended with {answer.error!r}"
        for wrong in _check_answer(answer, frozen_seconds):
            yield f"request {number}: {wrong}"
        if not answer.is_complete and must_complete(mesh.plan, happened, answer):
            yield f"request {number} must survive, but ended with {answer.error!r}"


def _check_answer(answer: Answer, frozen_seconds: float) -> Iterator[str]:
    if answer.bug is not None:
        yield f"raised {answer.bug!r}"
    if answer.seconds > answer.ask.timeout + frozen_seconds + SLACK_SECONDS:
        yield f"waited {answer.seconds:.2f} s, its time was {answer.ask.timeout} s"
    for sample in range(answer.ask.num_samples):
        for wrong in _check_sample(answer, sample):
            yield f"sample {sample} {wrong}"


def _check_sample(answer: Answer, sample: int) -> Iterator[str]:
    expected, tokens, text = answer.ask.expected, answer.tokens[sample], answer.texts[sample]
    if tokens != expected.tokens[: len(tokens)]:
        yield f"has wrong tokens: {tokens}, not {expected.tokens}"
    elif answer.is_complete and tokens != expected.tokens:
        yield f"lacks tokens: it has {len(tokens)} of {len(expected.tokens)}"
    if not expected.text.startswith(text) or (answer.is_complete and text != expected.text):
        yield f"has wrong text: {text!r}, not {expected.text!r}"
    if answer.num_ends[sample] != 1 if answer.is_complete else answer.num_ends[sample] > 1:
        yield f"ended {answer.num_ends[sample]} times"


async def check_idle_mesh(mesh: Mesh) -> list[str]:
    """Wait until every part has given back what it held; return what is still held."""
    loop = mesh.network.loop
    ends_at = loop.time() + IDLE_SECONDS
    while held := list(_held(mesh)):
        if loop.time() > ends_at:
            return held
        await asyncio.sleep(0.25)
    for part in mesh.of_kind("engine"):
        assert isinstance(part.service, SimulatedEngine)
        try:
            check_idle(part.service.core.core.scheduler)
        except AssertionError as error:
            held.append(f"{part.name}: {error!r}")
    return held


def _held(mesh: Mesh) -> Iterator[str]:
    active = mesh.active_coordinators()
    if len(active) != 1:
        yield f"{len(active)} coordinators serve"
        return
    epoch = active[0].service.servicer._epoch
    for part in mesh.of_kind("output_processor"):
        if part.process is not None and (followed := part.service.requests._placer._snapshot._epoch) != epoch:
            yield f"{part.name} follows coordinator {followed:x}, not {epoch:x}"
    for part in mesh.parts.values():
        if part.process is None:
            yield f"{part.name} is down"
            continue
        for name, number in _counts(part.kind, part.service):
            if number:
                yield f"{part.name} holds {number} {name}"


def _counts(kind: str, service: object) -> Iterator[tuple[str, int]]:
    if kind == "engine":
        yield from _engine_counts(service)  # type: ignore[arg-type]
    elif kind == "output_processor":
        requests = service.requests  # type: ignore[attr-defined]
        yield "requests", requests.num_live
        links = requests._placer._links._links.values()
        yield "attempts", sum(len(link.slots) for link in links)
        yield "counted picks", sum(requests._placer._snapshot._picks.values())
        yield "waiting picks", len(requests._placer._picks._waiting)
    elif kind == "gateway":
        generator = service.generator  # type: ignore[attr-defined]
        yield "outputs", generator.num_live
        pool = generator._outputs
        streams = [link.stream for link in pool._links if link.stream is not None]
        yield "slots", sum(len(stream.slots) for stream in streams)
        yield "waiting requests", len(pool._waiting)
        yield "bytes of prompts", pool._kept.taken
        yield "copied requests", len(pool._copies._copies) if pool._copies is not None else 0
    elif kind == "encoder":
        yield "calls", service._servicer.num_calls  # type: ignore[attr-defined]
        yield "bytes of rows in work", service._servicer.num_waiting  # type: ignore[attr-defined]
    elif kind == "coordinator" and service.servicer is not None:  # type: ignore[attr-defined]
        records = service.servicer._registry._records.values()  # type: ignore[attr-defined]
        yield "picks", sum(len(record._counted) for record in records)
        yield "reported requests", sum(record.report.running + record.report.waiting for record in records)
        yield "engines that are not in the wanted state", sum(not record.is_in_state for record in records)


def _engine_counts(service: SimulatedEngine) -> Iterator[tuple[str, int]]:
    scheduler, engine = service.core.core.scheduler, service.engine
    yield "requests in the core", len(scheduler.requests)
    yield "blocks", scheduler.kv.pool.num_blocks - scheduler.kv.pool.num_free
    yield "leases", scheduler.stats().num_leases
    yield "live requests", engine.load.num_live
    yield "attempts", len(engine.core._live)
    media = scheduler.media
    yield "bytes of rows", media.num_bytes if media is not None else 0
    yield "loads of rows", len(engine.core.rows._loads) if engine.core.rows is not None else 0
    yield "steps", int(service.core.core.has_work())
    yield "pauses", int(bool(engine.pause.mode))
    yield "sleeping cores", int(service.core.core.sleeping.is_sleeping())
