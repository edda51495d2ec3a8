"""Connects a gateway to the mesh behind it."""

from dataclasses import dataclass

from tokenloom.request.reasoning import ReasoningFormat, ReasoningMarks, marks_of
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.members import Members

from .assistant.message_plans import MessagePlans
from .gateway_settings import GatewaySettings
from .generation.admission import Admission
from .generation.backlog import Backlog
from .generation.generator import Generator
from .generation.resumable import ResumableRequests, UnattendedMetrics
from .health import MeshHealth
from .mesh.mesh_view import MeshView
from .mesh.output_pool import OutputPool
from .mesh.tokenizer_client import TokenizerClient
from .metrics import GatewayMetrics, MeshGauges, count_moved
from .tenants.tenant_shares import TenantShares


@dataclass(frozen=True, slots=True)
class ServedMesh:
    """Holds what the edges serve: one model, and what a request to it needs."""

    model: str
    """Its name for clients."""
    plans: MessagePlans
    generator: Generator
    tokenizers: TokenizerClient
    outputs: OutputPool
    view: MeshView
    health: MeshHealth
    metrics: GatewayMetrics


async def connect(settings: GatewaySettings, host: Host, shares: TenantShares) -> ServedMesh:
    """Connect to the other parts. Returns once a tokenizer has reported which model it serves."""
    tokenizers = TokenizerClient(Members(settings.tokenizers), host.channels)
    view = MeshView(settings.coordinator, host.channels)
    outputs = OutputPool(
        Members(settings.output_processors),
        settings.instance_id,
        host.epoch,
        host.channels,
        max_kept_bytes=settings.max_kept_prompt_bytes,
        on_moved=count_moved(host.metrics).inc,
    )
    health = MeshHealth(tokenizers, outputs, view)
    host.spawn(tokenizers.run(), name="tokenizer probes")
    host.spawn(view.run(), name="coordinator watch")
    info = await tokenizers.wait_known()
    backlog = Backlog(settings.max_queue_seconds, host.random, always_queued=settings.always_queued)
    view.follow_capacity(info.fingerprint, backlog.observe)
    outputs.start(host, info.fingerprint)
    model = settings.served_model_name or info.fingerprint.model
    host.metrics.register(MeshGauges(view, health, backlog, model))
    plans = MessagePlans.choose(settings.tool_call_parser, settings.reasoning_parser, info)
    metrics = GatewayMetrics(host.metrics, model)
    generator = Generator(
        tokenizers,
        view,
        outputs,
        metrics,
        Admission(shares, backlog, settings.most_urgent_priority),
        ResumableRequests(settings.keep_disconnected_requests, UnattendedMetrics(host.metrics), host.failed),
        default_timeout=settings.request_timeout,
        most_urgent_priority=settings.most_urgent_priority,
        max_request_values=settings.max_request_values,
        tracer=host.tracer,
        model=model,
        reasoning_marks=None if plans.reasoning is None else await _marks(plans.reasoning, tokenizers),
        random=host.random,
        clock=host.clock.nanoseconds,
    )
    return ServedMesh(model, plans, generator, tokenizers, outputs, view, health, metrics)


async def _marks(reasoning: ReasoningFormat, tokenizers: TokenizerClient) -> ReasoningMarks | None:
    """Return the marks of the model's reasoning as tokens; None if the tokenizer has no tokens for them."""
    texts = (reasoning.start, reasoning.end)
    encoded = await tokenizers.encode(texts, add_special_tokens=False)
    tokens = {text: list(prompt.token_ids) for text, prompt in zip(texts, encoded.prompts, strict=True)}
    return marks_of(reasoning, tokens.__getitem__) if all(tokens.values()) else None
