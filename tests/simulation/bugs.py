"""Bugs that the mesh once had or could have, put back one at a time: the simulation must find each of them soon."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tokenloom.engine_core.data.request import RequestKV
from tokenloom.engine_core.kv_cache import block_pool
from tokenloom.engine_core.kv_cache.state_slots import StateSlotPool
from tokenloom.engine_core.kv_transfer.leases import Lease, LeaseTable
from tokenloom.engine_core.scheduling.media_rows import RowStore
from tokenloom.engine_core.structured_output import compiler
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError
from tokenloom.request.errors import Internal, InvalidArgument, Unavailable
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.wanted_state import WantedState
from tokenloom.services.coordinator.lease import KubernetesLease
from tokenloom.services.engine.core import row_loads
from tokenloom.services.engine.kv import kv_peers
from tokenloom.services.engine.kv.kv_peers import Reading, ReleaseVerdict
from tokenloom.services.gateway.mesh import collector
from tokenloom.services.gateway.mesh.journal_copies import JournalCopies
from tokenloom.services.gateway.mesh.output_pool import OutputPool
from tokenloom.services.gateway.mesh.pending_request import PendingRequest
from tokenloom.services.gateway.mesh.process_stream import ProcessStream
from tokenloom.services.gateway.mesh.tokenizer_client import CallRetries, TokenizerClient
from tokenloom.services.output_processor.placement.engine_link import EngineLink
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.runtime.registry import registry_view
from tokenloom.services.tokenizer.render_worker import RenderJob
from tokenloom.services.tokenizer.renderer import Renderer
from tokenloom.v1.coordinator_pb2 import DesiredState


def _no_retry(pool: OutputPool, stream: ProcessStream, requests: list[PendingRequest]) -> None:
    """End the requests of an output processor that was lost, instead of sending them to another one."""
    for request in requests:
        request.fail(Unavailable("the output processor became unavailable"))


def _stale_frames(look: Callable[[EngineLink], None]) -> Callable[[EngineLink], None]:
    def go_on(link: EngineLink) -> None:
        """Report the attempts of an engine that hangs as lost, but take what it sends of them later."""
        try:
            look(link)
        except Unavailable as error:
            if link.error is None:
                link.error, link.may_compute = error, True
                for attempt in [*link.slots.values()]:
                    attempt.owner.on_lost(attempt, is_alone=False)

    return go_on


async def _never_renewed(reading: Reading) -> NoReturn:
    """Ignore that a lease ends while its blocks are copied."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


def _all_at_once(leases: LeaseTable, lease: Lease, tokens_ready: int) -> None:
    """Say of a running request that the KV of its next tokens is there, too."""
    lease.tokens_ready = lease.num_tokens


async def _always_valid(reading: Reading) -> ReleaseVerdict:
    """Use copied blocks without asking their owner whether they changed."""
    return ReleaseVerdict(valid=True)


async def _never_lost(lease: KubernetesLease) -> NoReturn:
    """Go on as the active coordinator, whatever happens to the lease."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


def _forgotten(wanted: WantedState, record: EngineRecord, *, is_complete: bool) -> DesiredState | None:
    """Send a process that has just started nothing of the state, as when operators called each engine."""
    if not (record.first.join.incarnation or record.report.progress.reached):
        return DesiredState(revision=wanted.revision)
    return _message(wanted, record, is_complete=is_complete)


_message = WantedState.message


def _nothing(wanted: WantedState, known: DesiredState) -> bool:
    """Take nothing over from engines that join again, or from the coordinator before."""
    return False


def _any(wanted: WantedState, known: DesiredState) -> bool:
    """Take over the state of whichever engine joins again, also one that is older."""
    is_other = known.revision not in (0, wanted.revision)
    if is_other:
        wanted.state = known
    return is_other


async def _no_wait(retries: CallRetries, came: asyncio.Event) -> NoReturn:
    """End a text when no tokenizer answers, instead of waiting for one."""
    raise Unavailable("No tokenizer is available; retry.")


async def _clients_fault(renderer: Renderer, job: RenderJob, status: int, num_deaths: int) -> NoReturn:
    """Take the loss of a process that renders for a limit of the conversation."""
    raise InvalidArgument("Rendering the conversation took too much memory.")


def _schemas_fault(error: BaseException) -> GrammarError:
    """Take the loss of a process that compiles for a fault of the grammar, which is remembered."""
    return GrammarError(f"the grammar could not be compiled: {error}")


def _found_at_once(states: StateSlotPool, request: RequestKV, num_tokens: int) -> None:
    """Let a state be hit in the very step that writes it."""
    _add(states, request, num_tokens)
    for kept in states._kept:
        states._keep(kept)


def _written_on(states: StateSlotPool, slot: int) -> int:
    """Change a state in place that can be hit."""
    return slot if slot >= 0 else states.pool.allocate(1)[0]


def _of_block_before(states: StateSlotPool, request: RequestKV, num_hits: int, num_found: int) -> None:
    """Begin with the state of fewer blocks than those that were hit."""
    _begin(states, request, num_hits, num_found)
    state = request.state
    found = [states.pool.find(block_hash) for block_hash in request.block_hashes[: max(0, num_hits - 1)]]
    if state is not None and (others := [slot for slot in found if slot is not None]):
        states.pool.share(others[-1:])
        states.pool.release([state.slot])
        state.slot = others[-1]


def _over_hit(states: StateSlotPool, request: RequestKV) -> None:
    """Load a state into the slot that the request hit, which others may hit too."""
    assert request.state is not None
    if request.state.slot < 0:
        _begin_load(states, request)
    else:
        request.state.is_kept = False


def _anywhere(states: StateSlotPool, request: RequestKV, num_tokens: int, most: int) -> int:
    """Cut prompts anywhere, also where the result depends on it."""
    return num_tokens


def _as_prompt(states: StateSlotPool, request: RequestKV, begin: int, end: int) -> tuple[int, ...]:
    """Compute tokens that were decoded as if they were a prompt, after a preemption or another engine's end."""
    return ()


def _blind(salt: bytes, *_: object) -> bytes:
    """Let prompts share KV whatever their images are."""
    return salt


_add, _begin, _begin_load = StateSlotPool.add, StateSlotPool.begin, StateSlotPool.begin_load


def _believed(output: SampleOutput, token_index: int, token_ids: Sequence[int], logprobs: Any = None) -> Any:
    """Take tokens as the next ones, wherever the engine says that they are."""
    return _add_tokens(output, len(output.token_ids), token_ids, logprobs)


_add_tokens = SampleOutput.add


def _from_the_beginning(copies: JournalCopies, request: PendingRequest, copy: Any) -> None:
    """Send all tokens of a request to its copy each time, instead of those that are new."""
    copy.num_sent = dict.fromkeys(copy.num_sent, 0)
    _send_news(copies, request, copy)


_send_news = JournalCopies._send_news


_BUGS: dict[str, dict[tuple[Any, str], Any]] = {
    "schemas_fault": {(compiler, "_for_clients"): _schemas_fault},
    "no_wait": {(CallRetries, "pause"): _no_wait},
    "clients_fault": {(Renderer, "_again"): _clients_fault},
    "no_retry": {(OutputPool, "on_lost"): _no_retry},
    "stale_frames": {(EngineLink, "_look"): _stale_frames(EngineLink._look)},
    "forgotten_state": {(WantedState, "message"): _forgotten},
    "state_of_one_life": {(WantedState, "adopt"): _nothing},
    "older_state": {(WantedState, "adopt"): _any},
    "kept_lease": {(KubernetesLease, "keep"): _never_lost},
    "stale_state": {(StateSlotPool, "add"): _found_at_once},
    "twice_written_state": {(StateSlotPool, "_take"): _written_on},
    "wrong_state": {(StateSlotPool, "begin"): _of_block_before},
    "loaded_over_hit": {(StateSlotPool, "begin_load"): _over_hit},
    "cut_state": {(StateSlotPool, "whole_chunks"): _anywhere},
    "state_of_prompt": {(StateSlotPool, "_replayed"): _as_prompt},
    "blind_to_images": {(block_pool, "media_salt"): _blind},
    "lost_file_is_final": {(row_loads, "MediaLost"): Internal},
    "rows_stay": {(RowStore, "drop"): _nothing},
    "no_copies": {(JournalCopies, "_place"): lambda *_: True},
    "copied_twice": {(JournalCopies, "_send_news"): _from_the_beginning},
    "believed_tokens": {(SampleOutput, "add"): _believed},
    "believed_blocks": {(kv_peers, "_check_answer"): lambda *_, **__: None},
    "believed_prompts": {(TokenizerClient, "_fits"): lambda *_: True},
    "any_reason": {(collector, "_ENDS"): range(256)},
    "torn_loads": {(registry_view, "fit_together"): lambda _: True},
    "early_blocks": {(LeaseTable, "publish"): _all_at_once},
    "ignored_lease": {(Reading, "keep"): _never_renewed, (Reading, "release"): _always_valid},
}
BUGS = tuple(_BUGS)


@contextmanager
def reintroduced(name: str) -> Iterator[None]:
    """Put a bug into the product for the length of the ``with``."""
    wrong = _BUGS[name]
    right = {(where, method): getattr(where, method) for where, method in wrong}
    _put(wrong)
    try:
        yield
    finally:
        _put(right)


def _put(methods: Mapping[tuple[Any, str], Any]) -> None:
    for (where, name), method in methods.items():
        setattr(where, name, method)
