"""Runs a campaign against one running mesh."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.model_files.checkpoint import load_tokenizer

from ..clients.exchange import ChaosClient
from ..clients.grpc_client import GrpcClient, GrpcTranscriptClient, SessionClient
from ..clients.load import Load, LoadOptions
from ..clients.media import IMAGE, SOUND, VIDEO, image_calls, sound_calls, transcript_cases
from ..clients.mix import Case, MakeCase, make_cases
from ..clients.openai_clients import PlainClient, ResumingClient
from ..clients.other_calls import OF_DEMO_MODEL, other_cases
from ..clients.record import Record
from ..clients.upload_clients import BatchClient, TranscriptClient
from ..faults.fault import SHARED, Fault, Injection, Kind
from ..faults.injector import Injector
from ..faults.outage import VICTIMS, engines_lost, host_paused, host_stutters
from ..faults.plan import in_order, make_plan, take_possible
from .attribution import is_failed
from .layouts import Layout, Media, Target, media_of
from .options import Campaign, ChaosOptions
from .summary import added_ttft, fault_name, rows_of, violations

_EXAMPLES = 20
_WAIT_SECONDS = 0.05
_IMPATIENT_SECONDS = 120.0
"""After this time without a possible fault the faults end: some part has not come back."""
_BETWEEN_SECONDS = 2.0
"""Least seconds between the end of a fault that lasts and the next one."""
_TERM_SECONDS = 5.0
"""About how long a part takes to drain and to start, for the rate of requests."""
_LEAST_REFERENCE_RATE = 4.0
"""Requests a second while the references are recorded, if the faults leave time for fewer."""
_SHORT_SECONDS = 4.0
"""Time limit of some requests during an outage, which lasts longer."""
_LEAST_PAUSE_SECONDS = 1.0
_LEAST_STUTTER_SECONDS = 10.0

_OF_MEDIA: Mapping[Media, tuple[Sequence[tuple[str, MakeCase]], Callable[[random.Random, int], list[Case]]]] = {
    Media.NONE: ((), lambda rng, length: []),
    Media.IMAGES: (IMAGE.features, image_calls),
    Media.VIDEOS: ((*IMAGE.features, *VIDEO.features), image_calls),
    Media.SOUNDS: (SOUND.features, sound_calls),
}
"""What chats do with the files of requests, and the calls of other dialects that take them."""

Note = Callable[[str], None]
"""Shows a line about the progress."""


class LayoutRun:
    """Holds what one layout's run has found."""

    def __init__(
        self, layout: Layout, position: tuple[int, int], campaign: Campaign, options: ChaosOptions, note: Note
    ) -> None:
        """``position``: index of the layout and number of layouts, which share the requests and faults."""
        index, number = position
        self._layout = layout
        self._campaign = campaign
        self._options = replace(options, requests=math.ceil(options.requests / number))
        self._note = note
        self._rng = random.Random(f"{options.seed}/{layout.name}")
        self._records: list[Record] = []
        self._injections: list[Injection] = []
        self._seconds = 0.0
        kinds = campaign.kinds(layout.kinds, options.kinds)
        self._plan = self._make_plan([(kind, _share(kind, options.each, index, number)) for kind in kinds])
        self._planned = len(self._plan)

    async def work(self, target: Target) -> None:
        """Send the requests undisturbed, then under the planned faults."""
        self._note(f"layout {self._layout.name}: {self._planned} faults planned; recording references")
        async with self.loaded(target, self._rate()) as load:
            injector = Injector(target.mesh, target.links)
            self._injections = injector.injections
            faults = asyncio.create_task(self._make_faults(injector, target))
            self._records = await load.run(self._options.requests, faults.done, lambda: injector.now)
            await faults
            self._seconds = injector.now

    @asynccontextmanager
    async def loaded(self, target: Target, rate: float) -> AsyncIterator[Load]:
        """Yield what sends the requests, ``rate`` of them in a second, once their undisturbed answers are recorded."""
        clients = self._clients(target)
        load = Load(clients, len(target.http), self._cases(), self._load_options(rate), self._rng)
        try:
            await load.record_references()
            yield load
        finally:
            for client in clients:
                await client.close()

    def report(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        found = violations(self._options, self._records, self._injections)
        if self._plan:
            found.append(f"faults that were never possible: {len(self._plan)} of {self._planned}")
        bad = [record for record in self._records if record.is_wrong or is_failed(record, self._injections)]
        slowest = sorted(self._records, key=lambda record: record.added_pause, reverse=True)
        is_ttft_limited = self._options.max_added_ttft_p99 is not None
        ttft = added_ttft(self._records, self._injections) if is_ttft_limited else math.nan
        return {
            "layout": self._layout.name,
            "seconds": round(self._seconds, 1),
            "rows": [row.report() for row in rows_of(self._records, self._injections)],
            "added_ttft_p99_s": None if math.isnan(ttft) else round(ttft, 4),
            "faults": [_fault_report(each) for each in self._injections],
            "examples": [f"{self._layout.name}: {_describe(record)}" for record in bad[:_EXAMPLES]],
            "slowest": [f"{record.added_pause:.2f} s: {_describe(record)}" for record in slowest[:_EXAMPLES]],
            "violations": found,
        }

    def _make_plan(self, shares: Sequence[tuple[Kind, range]]) -> list[Fault]:
        campaign, options = self._campaign, self._options
        kinds = [kind for kind, _ in shares]
        if campaign.is_outage:
            return [Fault(campaign.actions[0], kinds[0], options.duration, 0.0)] * options.each
        if campaign.is_of_host:
            least = min(_LEAST_PAUSE_SECONDS if campaign.is_pause else _LEAST_STUTTER_SECONDS, options.duration)
            seconds = (self._rng.uniform(least, options.duration) for _ in range(options.each))
            return [Fault(campaign.actions[0], kinds[0], each, 0.0) for each in seconds]
        if campaign.in_order:
            members = [1 if kind.may_be_last else options.parts for kind in kinds]
            return in_order(kinds, members, campaign.actions[0], options.each)
        rng = random.Random(f"{options.seed}/plan/{self._layout.name}")
        return make_plan(rng, shares, campaign.actions, options.duration)

    def _cases(self) -> list[Case]:
        options, media = self._options, media_of(self._options.checkpoint)
        rng = random.Random(f"{options.seed}/cases")
        if media is Media.TRANSCRIPTS:
            return transcript_cases(rng, options.cases)
        # Tokens that stand for images are added ones, and a prompt of ids has no images.
        vocab_size = load_tokenizer(options.checkpoint).get_vocab_size(with_added_tokens=media is Media.NONE)
        tokens = (options.min_tokens, options.max_tokens)
        features, calls = _OF_MEDIA[media]
        cases = make_cases(rng, vocab_size, tokens, options.cases, 2 * tuple(features))
        if self._campaign.streams_only:
            return [case for case in cases if case.streamed]
        config = json.loads((options.checkpoint / "config.json").read_text())
        config |= config.get("text_config", {})
        hidden_size = HIDDEN_SIZE if options.worker == "hash" and media is Media.NONE else config["hidden_size"]
        others = other_cases(rng, vocab_size, hidden_size, options.min_tokens)
        if options.model:
            others = [case for case in others if case.name not in OF_DEMO_MODEL]
        return cases + others + calls(rng, options.min_tokens)

    def _clients(self, target: Target) -> list[ChaosClient]:
        run = f"{self._options.seed}-{self._layout.name}-{self._rng.getrandbits(32):08x}"
        name = self._options.model_name
        return [
            PlainClient(target.http, name, is_held=self._options.hold_connections),
            ResumingClient(target.http, name, run),
            GrpcClient(target.grpc),
            SessionClient(target.grpc),
            BatchClient(target.http, name),
            TranscriptClient(target.http, name),
            GrpcTranscriptClient(target.grpc),
        ]

    def _rate(self) -> float:
        options = self._options
        seconds = sum(max(options.every, _seconds_taken(fault)) for fault in self._plan)
        if self._campaign.in_order:
            seconds += _TERM_SECONDS * self._planned
        return options.requests / seconds

    def _load_options(self, rate: float) -> LoadOptions:
        options = self._options
        return LoadOptions(
            rate=rate,
            reference_rate=max(rate, _LEAST_REFERENCE_RATE),
            concurrency=options.concurrency,
            seconds=options.timeout,
            short_seconds=_SHORT_SECONDS if self._campaign.is_outage else None,
            tolerance=options.logprob_tolerance,
        )

    async def _make_faults(self, injector: Injector, target: Target) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _BETWEEN_SECONDS
        while self._plan:
            await asyncio.sleep(max(due - loop.time(), 0))
            fault = await self._next_fault(injector)
            if fault is None:
                self._note("no planned fault has become possible; the faults end")
                break
            begun = loop.time()
            if self._campaign.is_outage:
                injection = await engines_lost(target.mesh, fault, injector.now)
                injector.injections.append(injection)
            elif self._campaign.is_pause:
                injection = await host_paused(target.mesh, fault, injector.now, self._rng)
                injector.injections.append(injection)
            elif self._campaign.is_stutter:
                victim = VICTIMS[(self._planned - len(self._plan) - 1) % len(VICTIMS)]
                injection = await host_stutters(target.mesh, fault, injector, self._rng, victim)
                injector.injections.append(injection)
            else:
                injection = await injector.inject(fault)
            self._note(f"{injection.began:7.1f} s  {_name(injection)}: {injection.effect or 'no effect was seen'}")
            if self._campaign.in_order:
                await injector.settle()
            due = max(begun + self._options.every, loop.time() + (_BETWEEN_SECONDS if fault.seconds else 0.0))
        await injector.settle()

    async def _next_fault(self, injector: Injector) -> Fault | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _IMPATIENT_SECONDS
        while loop.time() < deadline:
            first = 1 if self._campaign.in_order else len(self._plan)
            possible = [self._campaign.is_of_all or injector.is_possible(fault) for fault in self._plan[:first]]
            if (fault := take_possible(self._plan, possible)) is not None:
                return fault
            await asyncio.sleep(_WAIT_SECONDS)
        return None


def _seconds_taken(fault: Fault) -> float:
    return fault.seconds + _BETWEEN_SECONDS if fault.seconds else 0.0


def _share(kind: Kind, each: int, index: int, number: int) -> range:
    """Return which of the faults of a kind this layout makes; layouts share the kinds that all have."""
    if kind.name not in SHARED:
        return range(each)
    return range(math.ceil(each * index / number), math.ceil(each * (index + 1) / number))


def _name(injection: Injection) -> str:
    return f"{fault_name(injection.fault)} ({injection.part})"


def _fault_report(injection: Injection) -> dict[str, Any]:
    again = injection.served_again
    return {
        "fault": _name(injection),
        "began_s": round(injection.began, 2),
        "ended_s": round(injection.ended, 2),
        "effect": injection.effect,
        "served_again_s": None if again is None else round(again, 2),
    }


def _describe(record: Record) -> str:
    what = record.detail if record.failure else f"wrong: {record.detail}" if record.is_wrong else "whole"
    return (
        f"request {record.number} ({record.case}, {'stream' if record.streamed else 'unary'}, {record.client}, "
        f"gateway-{record.gateway}), {record.sent:.2f} to {record.ended:.2f} s, resumed {record.resumed}: {what}"
    )
