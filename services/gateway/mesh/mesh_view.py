"""Keeps what the coordinator last reported of the engines: limits, load, and which of them serve."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.request.validation import max_logprobs
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import SERVED_FIELDS, fingerprint_difference, is_foreign, misfit_of
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, output_processor_pb2, types_pb2
from tokenloom.v1.coordinator_pb2 import EngineEntry
from tokenloom.v1.types_pb2 import EngineRole

OTHER_WEIGHTS = "other_weights"


def engine_words(entry: coordinator_pb2.EngineEntry) -> dict[str, object]:
    """Return ``role`` and ``state`` of an engine as the coordinator last reported them, such as ``decode``, and what it
    does without."""
    report = entry.report
    fall_backs = {each.kind: each.detail for each in report.fall_backs}
    return {
        "role": types_pb2.EngineRole.Name(report.role).removeprefix("ENGINE_ROLE_").lower(),
        "state": "aside" if OTHER_WEIGHTS in fall_backs else _state(report.state),
        **({"fall_backs": fall_backs} if fall_backs else {}),
    }


def rule_word(rule: coordinator_pb2.PlacementRule) -> str | None:
    """Return the value of ``--placement`` of the coordinator, ``plugin`` for any plugin; None: it is of a release that
    does not show it."""
    words = {
        coordinator_pb2.PlacementRule.PLACEMENT_RULE_SCORE: "score",
        coordinator_pb2.PlacementRule.PLACEMENT_RULE_COST: "cost",
        coordinator_pb2.PlacementRule.PLACEMENT_RULE_PLUGIN: "plugin",
    }
    return words.get(rule)


def placement_values(entry: coordinator_pb2.EngineEntry, rule: str | None) -> dict[str, float]:
    """Return what a rule compares of an engine, and what it computes that from; see ``PlacementRule``."""
    report = entry.report
    values: dict[str, float] = {"waiting": entry.waiting, "running": report.running, "score": entry.score}
    if rule == "cost":
        values |= {
            "seats": report.seats,
            "step_seconds": report.step_seconds,
            "uncached_tokens": entry.uncached_tokens,
            "uncached_tokens_per_second": entry.uncached_tokens_per_second,
            "expected_seconds": entry.expected_seconds,
        }
    return values


def _state(state: int) -> str:
    """Return the name of a state; that of a newer release's coordinator may be unknown."""
    names = {number: name for name, number in coordinator_pb2.EngineState.items()}
    return names[state].removeprefix("ENGINE_STATE_").lower() if state in names else f"unknown ({state})"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity and the load of all serving engines together.

    Attributes:
        seats: Requests that may run at the same time; 0: not known.
        prefill_tokens_per_second: Prompt tokens that leave the queues while only compute limits them; 0: not known.
        starts_per_second: Requests that leave the queues while they wait for seats; 0: not known.
        live: Requests that run or wait.
        waiting_tokens: Prompt tokens that are not computed yet.
        serves: Whether an engine serves.
    """

    seats: int = 0
    prefill_tokens_per_second: float = 0.0
    starts_per_second: float = 0.0
    live: int = 0
    waiting_tokens: int = 0
    serves: bool = True

    @classmethod
    def of(cls, engines: Sequence[EngineEntry]) -> "Capacity":
        """Return the capacity of these engines. Engines that decode provide the seats, engines that prefill compute
        the prompts; if a role is missing, the engines of the other one do its work."""
        decoding = _of_roles(engines, EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_DECODE)
        prefilling = _of_roles(engines, EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL)
        return cls(
            seats=sum(entry.report.seats for entry in decoding),
            prefill_tokens_per_second=_total(prefilling, attrgetter("report.prefill_tokens_per_second")),
            starts_per_second=_total(decoding, attrgetter("report.starts_per_second")),
            live=sum(entry.report.running + entry.waiting for entry in engines),
            waiting_tokens=sum(entry.waiting_tokens for entry in prefilling),
        )

    def without_load(self) -> "Capacity":
        """Return the same capacity with nothing to do: the load is not known any more."""
        return replace(self, live=0, waiting_tokens=0)

    def without_engines(self) -> "Capacity":
        """Return the same capacity while no engine serves: the next ones are expected to be as fast."""
        return replace(self.without_load(), serves=False)


def _of_roles(engines: Sequence[EngineEntry], *roles: EngineRole) -> Sequence[EngineEntry]:
    return [entry for entry in engines if entry.report.role in roles] or engines


def _total(engines: Iterable[EngineEntry], rate_of: Callable[[EngineEntry], float]) -> float:
    """Return the sum of a rate. An engine whose rate is not known counts as the mean of the others."""
    rates = list(map(rate_of, engines))
    # An engine that just joined has measured nothing. As zero it would make the mesh look slower the more engines it
    # gets.
    known = [rate for rate in rates if rate > 0]
    return sum(known) * len(rates) / len(known) if known else 0.0


LOST_SECONDS = 300.0
"""How long an engine that left without draining counts as missing, unless it returns."""


@dataclass(frozen=True, slots=True)
class MeshLoad:
    """The load of all engines together.

    Attributes:
        kv_usage: Share of all their KV blocks, 0 to 1.
    """

    num_running: int
    num_waiting: int
    kv_usage: float


class MeshView:
    """Watches the coordinator. It is not on the data path: while it is away, the last complete view stays.

    Attributes:
        address: The coordinator's.
        block_size: Tokens of a KV block of the serving engines; 0: they differ, or none has served yet.
        connected: Whether the coordinator answers.
        adapters: The LoRA adapters that requests may name, by name.
        limits: What every serving engine accepts, or accepted when the last one served; None before the first.
    """

    def __init__(
        self, address: str, channels: Channels, fall_backs: FallBacks | None = None, *, beside_engine: str = ""
    ) -> None:
        """``fall_backs``: where it is noted that the coordinator is away; None: nowhere. ``beside_engine``: the engine
        whose load alone is shown; empty: that of all is."""
        self.address = address
        self._channels = channels
        self._loop = asyncio.get_running_loop()
        self._fall_backs = fall_backs or FallBacks()
        self._beside_engine = beside_engine
        self._view = RegistryView()
        self._version = 0  # of the view, when the engines were taken from it
        self._engines: Sequence[coordinator_pb2.EngineEntry] = ()
        self._encoders: Sequence[coordinator_pb2.EngineEntry] = ()  # the same list as the view's
        self._serving: tuple[types_pb2.Fingerprint, Sequence[coordinator_pb2.EngineEntry]] | None = None
        self._fingerprint: types_pb2.Fingerprint | None = None
        self._lost: dict[str, float] = {}  # loop time at which each engine left; entries are dropped after LOST_SECONDS
        self._lost_encoders: dict[str, float] = {}  # the same
        self._misfits: dict[str, str] = {}  # encoders that get no files, with the reason
        self._capacity = Capacity(serves=False)
        self._on_capacity: Callable[[Capacity], None] | None = None
        self.connected = False
        self.block_size = 0
        self.limits: types_pb2.ModelLimits | None = None
        self._own_limits: list[types_pb2.ModelLimits] = []  # of the last engines of ours that served
        self.adapters: Mapping[str, types_pb2.Adapter] = {}
        self._taken = asyncio.Event()  # a new one for each snapshot

    @property
    def engines(self) -> Iterable[coordinator_pb2.EngineEntry]:
        """Return all engines of the last complete view, with their newest loads."""
        self._view.update_loads()
        return self._engines

    @property
    def known_encoders(self) -> Sequence[coordinator_pb2.EngineEntry]:
        """All encoders of the last complete view."""
        return self._view.encoders

    @property
    def encoders(self) -> Sequence[coordinator_pb2.EngineEntry]:
        """Return the encoders of the last complete view that take files, and have the checkpoint of an engine."""
        return [
            entry
            for entry in self._view.encoders
            if entry.report.state == coordinator_pb2.ENGINE_STATE_SERVING
            and entry.identity.engine_id not in self._misfits
        ]

    def follow_capacity(self, fingerprint: types_pb2.Fingerprint, on_capacity: Callable[[Capacity], None]) -> None:
        """Call ``on_capacity`` now and with each snapshot. Without a serving engine, or without a coordinator, it gets
        the last capacity, with no load."""
        self._on_capacity = on_capacity
        self._fingerprint = fingerprint
        self._update_limits()
        self._update_misfits()
        self._update_capacity()

    def check_source(self, kv: output_processor_pb2.KVHandover) -> None:
        """Raise ``InvalidArgument`` for KV of an engine that the coordinator does not know, ``Unavailable`` if that is
        not known because the coordinator is away, ``InvalidArgument`` for a first token that the model does not have.
        """
        if not kv.HasField("source"):
            return
        if self.limits is not None and kv.first_token_id >= self.limits.vocab_size:
            message = f"first_token_id {kv.first_token_id} is not below {self.limits.vocab_size}"
            raise InvalidArgument(f"kv_transfer_params: {message}", "kv_transfer_params")
        source = kv.source
        known = {(entry.identity.engine_id, entry.identity.epoch) for entry in self._engines}
        if (source.engine_id, source.engine_epoch) not in known:
            message = f"kv_transfer_params: the registry has no engine {source.engine_id[:64]!r} of this incarnation"
            if not self.connected:  # it may have come since
                raise Unavailable(f"{message} yet, and the coordinator is away; retry")
            raise InvalidArgument(f"{message}; leave them out, and the prompt is computed again", "kv_transfer_params")

    @property
    def seen_engines(self) -> Sequence[coordinator_pb2.EngineEntry]:
        """All engines, with the loads that the event loop has read last. Reading it changes nothing, so that the thread
        of a scrape may."""
        return self._engines

    @property
    def placement(self) -> str | None:
        """The rule by which the coordinator compares engines; None: it does not say."""
        return rule_word(self._view.placement)

    def load(self) -> MeshLoad:
        """Return the load that balancers are shown, as the engines last reported it."""
        return load_of(self.shown(self.engines))

    def shown(self, engines: Iterable[EngineEntry]) -> Sequence[EngineEntry]:
        """Return those of ``engines`` whose load balancers are shown: all, or the one beside which the gateway runs."""
        beside = self._beside_engine
        return [entry for entry in engines if not beside or entry.identity.engine_id == beside]

    def serving(self, fingerprint: types_pb2.Fingerprint) -> Sequence[coordinator_pb2.EngineEntry]:
        """Return the engines that serve what our tokenizer encodes for."""
        self._view.update_loads()
        if self._serving is None or self._serving[0] != fingerprint:
            self._serving = (
                fingerprint,
                [
                    entry
                    for entry in self._engines
                    if entry.report.state == coordinator_pb2.ENGINE_STATE_SERVING
                    and fingerprint_difference(fingerprint, entry.identity.fingerprint, SERVED_FIELDS) is None
                ],
            )
        return self._serving[1]

    def count_engines(self, fingerprint: types_pb2.Fingerprint) -> tuple[int, int]:
        """Return how many engines serve what our tokenizer encodes for, and how many should: all that are known and do
        not drain, and those that were lost within the last ``LOST_SECONDS``. The thread of a scrape calls it too."""
        ours = [
            entry.report.state
            for entry in self._engines
            if fingerprint_difference(fingerprint, entry.identity.fingerprint, SERVED_FIELDS) is None
        ]
        num_serving = ours.count(coordinator_pb2.ENGINE_STATE_SERVING)
        num_draining = ours.count(coordinator_pb2.ENGINE_STATE_DRAINING)
        now = self._loop.time()
        num_lost = sum(now - lost_at < LOST_SECONDS for lost_at in list(self._lost.values()))
        return num_serving, len(ours) - num_draining + num_lost

    @property
    def num_serving(self) -> int:
        """How many engines serve what our tokenizer encodes for; 0 before the tokenizer is known. The thread of a
        scrape may read it."""
        return 0 if self._fingerprint is None else self.count_engines(self._fingerprint)[0]

    def count_encoders(self) -> tuple[int, int]:
        """Return how many encoders take files, and how many should, as :meth:`count_engines` does."""
        states = [entry.report.state for entry in self._view.encoders]
        num_draining, now = states.count(coordinator_pb2.ENGINE_STATE_DRAINING), self._loop.time()
        num_lost = sum(now - lost_at < LOST_SECONDS for lost_at in list(self._lost_encoders.values()))
        return len(self.encoders), len(states) - num_draining + num_lost

    def lost_engines(self) -> dict[str, float]:
        """Return the engines that left without draining within the last ``LOST_SECONDS`` and have not returned, each
        with the seconds since then."""
        now = asyncio.get_running_loop().time()
        return {name: now - lost_at for name, lost_at in self._lost.items() if now - lost_at < LOST_SECONDS}

    async def wait_adapter(self, wanted: types_pb2.Adapter) -> None:
        """Return once the snapshot shows this adapter, with its digest and its pinning, and requests that name it get
        it. Without a digest: once they are refused."""
        while not _is_shown(wanted, self.adapters.get(wanted.name)):
            await self._taken.wait()

    async def wait_limits(self) -> types_pb2.ModelLimits:
        """Return :attr:`limits`, once an engine serves."""
        while self.limits is None:
            await self._taken.wait()
        return self.limits

    async def run(self) -> None:
        """Watch and reconnect, until cancelled."""
        async with self._channels.open(self.address, "coordinator") as channel:
            await watch_registry(coordinator_pb2_grpc.CoordinatorStub(channel), self._take, self._lose)

    def _lose(self, reason: str) -> None:
        """Note that the coordinator is away."""
        if self.connected:
            self._fall_backs.begin("old_view", reason, self.address)
        self.connected = False
        # The rates stay, because engines are as fast as before; the load of minutes ago would refuse requests for no
        # reason.
        self._publish_capacity(self._capacity.without_load())

    def _take(self, view: RegistryView) -> None:
        self.connected = True
        self._fall_backs.end("old_view", self.address)
        # A coordinator that has just restarted does not know its engines yet: prefer the older, complete view.
        if view.complete or not self._view.complete:
            is_same, before = view is self._view and view.version == self._version, self._encoders
            self._view = view
            if not is_same:  # most changes are of loads alone
                self._update_engines(view)
                self._encoders = view.encoders
                self._lost_encoders = _note_lost(self._lost_encoders, before, view.encoders)
                self._update_misfits()
        self._update_capacity()
        taken, self._taken = self._taken, asyncio.Event()
        taken.set()

    def _update_engines(self, view: RegistryView) -> None:
        """Note which engines there are now, and which of them serve."""
        self._version = view.version
        if view.adapters or self.adapters:
            self.adapters = {adapter.name: adapter for adapter in view.adapters}
        before, self._engines = self._engines, view.engines
        self._serving = None
        self._update_limits()
        self._lost = _note_lost(self._lost, before, self._engines)

    def _update_misfits(self) -> None:
        """Set encoders aside that have another checkpoint than the engines: of their rows, answers would be wrong."""
        entries, desired = self._view.encoders, self._view.desired
        if not (entries or self._misfits) or self._fingerprint is None:
            return
        # One for each version: with a thousand engines and 16 encoders, all pairs took 13 ms, at each engine that came.
        fingerprints = (each.identity.fingerprint for each in self.serving(self._fingerprint))
        engines = list({each.weights: each for each in fingerprints}.values())
        # Weights that were loaded into engines after their start are those of no encoder.
        if desired.weights_version or any(each.weights_path for each in desired.engines):
            engines = []
        found = {each.identity.engine_id: misfit_of(each.identity.fingerprint, engines) for each in entries}
        before, self._misfits = self._misfits, {name: reason for name, reason in found.items() if reason}
        for name in before.keys() - self._misfits:
            self._fall_backs.end(OTHER_WEIGHTS, name)
        for name, reason in self._misfits.items():
            self._fall_backs.begin(OTHER_WEIGHTS, reason, name)

    def _update_capacity(self) -> None:
        if self._fingerprint is None:
            return
        serving = self.serving(self._fingerprint)
        self._publish_capacity(Capacity.of(serving) if serving else self._capacity.without_engines())

    def _publish_capacity(self, capacity: Capacity) -> None:
        self._capacity = capacity
        if self._on_capacity is not None:
            self._on_capacity(capacity)

    def _update_limits(self) -> None:
        if self._fingerprint is None:
            return
        serving = self.serving(self._fingerprint)
        if everything := [entry.identity.limits for entry in serving]:
            sizes = {entry.identity.fingerprint.block_size for entry in serving}
            self.block_size = sizes.pop() if len(sizes) == 1 else 0
            # A request that a server of others cannot run goes to an engine of ours: what these do counts, and goes on
            # to count while the last of them is lost, because one in its place does it too.
            own = [each.identity.limits for each in serving if not is_foreign(each.identity.fingerprint.numerics)]
            limits = self._own_limits = own or self._own_limits or everything
            self.limits = types_pb2.ModelLimits(
                # The limits are those of the engines, after fitting to their memory, and not of a file: two sources of
                # one limit would disagree as soon as an operator sets --max-model-len. Placement may choose any engine,
                # so the smallest counts.
                max_model_len=min(limit.max_model_len for limit in everything),
                vocab_size=min(limit.vocab_size for limit in everything),
                max_logprobs=min(map(max_logprobs, limits)),
                priorities=all(limit.priorities for limit in limits),
                experts_per_token=min(limit.experts_per_token for limit in limits),
                hidden_size=min(limit.hidden_size for limit in limits),
                reasoning=min(limit.reasoning for limit in limits),
                pooling_tasks=_common_tasks(limits),
                generates=all(limit.generates or not limit.HasField("generates") for limit in limits),
                matryoshka=all(limit.matryoshka for limit in limits),
                class_labels=limits[0].class_labels,
                max_lora_rank=max(limit.max_lora_rank for limit in limits),
                media_kinds=_common_kinds(limits),
                max_images_per_prompt=min(limit.max_images_per_prompt for limit in limits),
                max_sounds_per_prompt=min(limit.max_sounds_per_prompt for limit in limits),
                max_videos_per_prompt=min(limit.max_videos_per_prompt for limit in limits),
                max_media_rows=min(limit.max_media_rows for limit in limits),
                cross_media_rows=min(limit.cross_media_rows for limit in limits),
                argument_schemas=_common_schemas(limits),
            )


def _note_lost(lost: dict[str, float], before: Iterable[EngineEntry], after: Iterable[EngineEntry]) -> dict[str, float]:
    """Return by name the loop time at which each engine left without draining, of those that have not returned.

    ``lost``: those that had left. ``before``, ``after``: the engines of two views.
    """
    now, present = asyncio.get_running_loop().time(), {entry.identity.engine_id for entry in after}
    serving = (each for each in before if each.report.state == coordinator_pb2.ENGINE_STATE_SERVING)
    left = {each.identity.engine_id: now for each in serving} | lost
    return {name: at for name, at in left.items() if name not in present and now - at < LOST_SECONDS}


def load_of(entries: Iterable[coordinator_pb2.EngineEntry]) -> MeshLoad:
    """Return the load of these engines together."""
    entries = list(entries)
    num_blocks = sum(entry.identity.num_kv_blocks for entry in entries)
    num_used = sum(entry.report.kv_usage * entry.identity.num_kv_blocks for entry in entries)
    return MeshLoad(
        num_running=sum(entry.report.running for entry in entries),
        num_waiting=sum(entry.report.waiting for entry in entries),
        kv_usage=num_used / num_blocks if num_blocks else 0.0,
    )


def _common_tasks(limits: list[types_pb2.ModelLimits]) -> list[types_pb2.PoolingTask]:
    """Return the pooling tasks that all engines serve."""
    return [task for task in limits[0].pooling_tasks if all(task in limit.pooling_tasks for limit in limits)]


def _common_schemas(limits: list[types_pb2.ModelLimits]) -> list[str]:
    """Return the schemas of arguments for plugins that all engines read."""
    schemas = limits[0].argument_schemas
    return [schema for schema in schemas if all(schema in limit.argument_schemas for limit in limits)]


def _common_kinds(limits: list[types_pb2.ModelLimits]) -> list[types_pb2.MediaKind]:
    """Return the kinds of media that all engines take in prompts."""
    return [kind for kind in limits[0].media_kinds if all(kind in limit.media_kinds for limit in limits)]


def _is_shown(wanted: types_pb2.Adapter, shown: types_pb2.Adapter | None) -> bool:
    if shown is None or not wanted.digest:
        return shown is None and not wanted.digest
    return (shown.digest, shown.pinned) == (wanted.digest, wanted.pinned)
