"""Connects a gateway to the mesh behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.reasoning import ReasoningFormat, ReasoningMarks, marks_of
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.members import PeerMembers, ReplicaIndex
from tokenloom.services.runtime.streams.slotted_stream import ANY_TOKEN
from tokenloom.v1 import tokenizer_pb2
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.tokenizer_pb2 import TranscriptTraits

from ..assistant.message_plans import MessagePlans
from ..generation.admission import RequestAdmission, WaitEstimator
from ..generation.generator import Generator
from ..generation.preparation import MeshLinks, RequestContext
from ..generation.resumable import ResumableRequests, UnattendedMetrics
from ..mesh.mesh_view import Capacity, MeshView
from ..mesh.output_pool import OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..metrics.gateway_metrics import GatewayMetrics
from ..metrics.usage_counts import AdapterUsage, KeyUsage
from ..records.model_names import ModelNames
from ..settings.gateway_settings import GatewaySettings
from ..settings.mesh_spec import MeshSpec
from ..tenants.tenant_shares import TenantShares
from .mesh_gauges import MeshGauges
from .mesh_health import MeshHealth

if TYPE_CHECKING:
    from ..mesh.encoder_client import EncoderClient


@dataclass(frozen=True, slots=True)
class ServedMesh:
    """Holds what the servers serve: one model, and what a request to it needs."""

    models: ModelNames
    plans: MessagePlans
    generator: Generator
    tokenizers: TokenizerClient
    outputs: OutputPool
    view: MeshView
    health: MeshHealth
    metrics: GatewayMetrics

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names for clients; the first one stands in answers and metrics."""
        return self.models.own

    @property
    def model(self) -> str:
        """The model's first name."""
        return self.names[0]

    def transcript_traits(self) -> TranscriptTraits:
        """Return what the model needs to transcribe sounds. Raises ``InvalidArgument`` if it does not do so."""
        info = self.tokenizers.info
        if info is None or not info.HasField("transcript"):
            raise InvalidArgument(f"the model {self.model!r} does not transcribe sounds", "model")
        return info.transcript


@dataclass(frozen=True, slots=True)
class MeshMetrics:
    """Holds where a mesh's metrics go.

    Attributes:
        registry: Of the metrics with the label ``model_name``.
        moved, unattended, key_usage, adapter_usage: Counted for all meshes of the gateway together.
    """

    registry: CollectorRegistry
    moved: Counter
    unattended: UnattendedMetrics
    key_usage: KeyUsage
    adapter_usage: AdapterUsage


def _plans(settings: GatewaySettings, info: tokenizer_pb2.GetTokenizerInfoResponse) -> MessagePlans:
    """Return the formats of turns. Raises ``InvalidArgument`` for a plugin that cannot be loaded, or is no format."""
    try:
        return MessagePlans.choose(
            settings.tool_call_parser,
            settings.reasoning_parser,
            info,
            hides_unused_tools=settings.exclude_tools_when_tool_choice_none,
            plugins=settings.plugins,
        )
    except ValueError as error:
        raise InvalidArgument(str(error), "plugins") from error


async def connect(
    spec: MeshSpec, settings: GatewaySettings, host: Host, shares: TenantShares, metrics: MeshMetrics
) -> ServedMesh:
    """Connect to the other parts. Returns once a tokenizer has reported which model it serves."""
    tokenizer_members = PeerMembers(spec.tokenizers, size=settings.peer_subset)
    output_members = PeerMembers(spec.output_processors, size=settings.peer_subset)
    tokenizers = TokenizerClient(tokenizer_members, host.channels, host.fall_backs)
    view = MeshView(spec.coordinator, host.channels, host.fall_backs, beside_engine=settings.beside_engine)
    outputs = OutputPool(
        output_members,
        settings.instance_id,
        host.epoch,
        host.channels,
        max_kept_bytes=settings.max_kept_prompt_bytes,
        on_moved=metrics.moved.inc,
        copies_journals=settings.journal_copies > 1,
    )
    needs_engines = not settings.ready_without_engines
    health = MeshHealth(tokenizers, outputs, view, host.fall_backs, needs_engines=needs_engines)
    host.spawn(tokenizers.run(), name="tokenizer probes")
    host.spawn(view.run(), name="coordinator watch")
    host.spawn(_enroll(spec, settings, host, (tokenizer_members, output_members)), name="enrolment")
    # The gateway reads no checkpoint: the model's default sampling parameters, its parsers and its fingerprint come
    # with the tokenizer's information.
    info = await tokenizers.wait_known()
    estimator = WaitEstimator(settings.max_queue_seconds, host.random, always_queued=settings.always_queued)

    def observe(capacity: Capacity) -> None:
        estimator.observe(capacity)
        if view.limits is not None:
            outputs.vocab_size = view.limits.vocab_size or ANY_TOKEN

    view.follow_capacity(info.fingerprint, observe)
    outputs.start(host, info.fingerprint)
    names = spec.names or (info.fingerprint.model,)
    model = names[0]
    metrics.registry.register(MeshGauges(view, estimator, model))
    plans = await _plans(settings, info).with_openings(tokenizers)
    counts = GatewayMetrics(metrics.registry, model, metrics.key_usage, metrics.adapter_usage)
    context = RequestContext(
        model=model,
        default_timeout=settings.request_timeout,
        most_urgent_priority=settings.most_urgent_priority,
        max_request_values=settings.max_request_values,
        random=host.random,
        clock=host.clock.nanoseconds,
        tracer=host.tracer,
        bill=host.bill,
        replays_ids=settings.replay_ids,
        beside_engine=settings.beside_engine,
    )
    has_files = info.media_kinds or info.HasField("transcript")
    generator = Generator(
        MeshLinks(tokenizers, view, outputs, _encoders(view, host, context, settings) if has_files else None),
        context,
        counts,
        RequestAdmission(shares, estimator, settings.most_urgent_priority, counts.count_promise),
        ResumableRequests(settings.keep_disconnected_requests, metrics.unattended, host.failed),
        reasoning_marks=None if plans.reasoning is None else await _marks(plans.reasoning, tokenizers),
    )
    return ServedMesh(ModelNames(names, view), plans, generator, tokenizers, outputs, view, health, counts)


def _encoders(view: MeshView, host: Host, context: RequestContext, settings: GatewaySettings) -> "EncoderClient":
    from ..mesh.encoder_client import EncoderClient  # here: most models read no images
    from ..records.media import KeptFiles

    return EncoderClient(view, host.channels, context.draw_id, KeptFiles(settings.max_stored_media_bytes))


async def _enroll(spec: MeshSpec, settings: GatewaySettings, host: Host, peers: Sequence[PeerMembers]) -> None:
    """Keep this gateway's position among the gateways of the mesh, from which its subsets of large meshes follow."""
    enrolment = ReplicaIndex("gateway", settings.instance_id)

    def moved() -> None:
        assert enrolment.position is not None
        for members in peers:
            members.move(enrolment.position)

    async with host.channels.open(spec.coordinator, "coordinator") as channel:
        await enrolment.run(CoordinatorStub(channel), moved)


async def _marks(reasoning: ReasoningFormat, tokenizers: TokenizerClient) -> ReasoningMarks | None:
    """Return the marks of the model's reasoning as tokens; None if the tokenizer has no tokens for them."""
    texts = [text for text in (reasoning.start, reasoning.end, reasoning.aside) if text]
    encoded = await tokenizers.encode(texts, add_special_tokens=False)
    tokens = {text: list(prompt.token_ids) for text, prompt in zip(texts, encoded.prompts, strict=True)}
    return marks_of(reasoning, tokens.__getitem__) if all(tokens.values()) else None
