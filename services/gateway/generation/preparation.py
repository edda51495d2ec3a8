"""Prepares requests: resolves parameters, encodes prompts, checks both and makes the output processors' requests."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tokenloom.request import errors, packed_ids, validation
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.request.prompt_embeds import check_embeds
from tokenloom.services.runtime.telemetry.tracing import CURRENT, Tracer
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2

from ..mesh.mesh_view import MeshView
from ..mesh.output_pool import OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import (
    SHEDDABLE_PRIORITY,
    Chat,
    Encode,
    GenerateRequest,
    RestorableMedia,
    session_digest,
    sound_of,
)
from ..records.pooling_input import NO_GENERATION, task_names
from ..settings.gateway_settings import DEFAULT_MAX_VALUES
from ..tenants.tenant import SALT_BYTES
from .beam_run import BeamPlan, plan_beams
from .encoded_prompt import (
    EncodedPrompt,
    add_hashes,
    check_copies,
    continued,
    echoed_texts,
    encode_prompts,
    forbid_words,
    truncated,
)
from .open_turn import MAX_SESSION_NAME, OpenTurn, TurnComparer, TurnNames
from .past_turns import MAX_CHAT_BYTES, PastTurns

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

    from ..mesh.encoder_client import EncoderClient, RequestMedia

_TRUNCATED_CONTEXTS = 8
"""Limit on a text that is to be truncated, in contexts: all of it is encoded first."""


@dataclass(frozen=True, slots=True)
class MeshLinks:
    """Holds the links of one mesh: to its tokenizers, its coordinator and its output processors."""

    tokenizers: TokenizerClient
    view: MeshView
    outputs: OutputPool
    encoders: "EncoderClient | None" = None
    """None: the model reads text only."""

    def limits(self) -> types_pb2.ModelLimits:
        """Return the limits of the model. Raises ``Unavailable`` before the first engine serves."""
        if self.view.limits is None:
            raise errors.Unavailable("no engine is serving yet; retry")
        return self.view.limits


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds the output processors' requests, one for each prompt: checked, but without ids and timeout."""

    submits: Sequence[output_processor_pb2.Submit]
    num_prompt_tokens: int
    """Of all prompts together."""
    num_output_tokens: int
    """The most tokens of all outputs together."""
    prompt_texts: Sequence[str]
    """The text of each prompt, when it is to be echoed."""
    opens_reasoning: bool
    """Whether the chat template has opened the model's reasoning."""
    is_constrained_throughout: bool
    """Whether a constraint applies from the first token of the outputs, reasoning included."""
    started_ns: int
    tokenize_ns: int
    clock: Callable[[], int]
    """Returns nanoseconds, as ``started_ns``."""
    beams: BeamPlan | None = None
    """How to search; None: the outputs are sampled."""
    turn: OpenTurn | None = None
    """How the prompt differs from the turn before it; None: it is no turn of a conversation."""
    media: RestorableMedia | None = None
    """Its images, or its sound; None: it has none."""
    has_seed: bool = True
    """Whether the client has chosen the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Holds what all requests of a model have in common.

    Attributes:
        model: Its name in answers, logs and traces.
        default_timeout: Seconds that a request may take; a client may ask for less.
        most_urgent_priority: The lowest priority that a client gets, whatever it asks for.
        max_request_values: Limits ``n * max_tokens * (1 + logprobs)`` of a request.
        random: Draws the ids of requests, and the seeds of those that have none.
        clock: Returns nanoseconds.
        tracer: Makes the spans of requests; None: they are not traced.
        bill: Shares the CPU time of this process out to calls; None without ``--bill``.
        replays_ids: Put generated tokens in the place of those of a fresh tokenization.
        beside_engine: The engine that requests prefer; empty: none.
    """

    model: str = ""
    default_timeout: float
    most_urgent_priority: int = 0
    max_request_values: int = DEFAULT_MAX_VALUES
    random: Random
    clock: Callable[[], int]
    tracer: Tracer | None = None
    bill: "CpuBill | None" = None
    replays_ids: bool = False
    beside_engine: str = ""

    def draw_id(self) -> str:
        """Return the random id of a request."""
        return self.random.randbytes(16).hex()

    def priority_of(self, request: GenerateRequest, limits: types_pb2.ModelLimits) -> int:
        """Return the priority with which a request runs. Raises ``InvalidArgument`` where engines take none."""
        priority = 0
        if request.priority:
            validation.check_priority(request.priority, limits)
            priority = max(request.priority, self.most_urgent_priority)
        return max(priority, SHEDDABLE_PRIORITY) if request.is_sheddable and limits.priorities else priority


class Preparer:
    """Prepares requests with a tokenizer's help."""

    def __init__(self, links: MeshLinks, context: RequestContext) -> None:
        self._links = links
        self._tokenizers = links.tokenizers
        self._context = context
        self.past_turns = PastTurns(lambda: context.clock() / 1e9)
        self._turns = TurnComparer(self.past_turns, replays_ids=context.replays_ids)

    def open_media(self, request: GenerateRequest) -> "RequestMedia":
        """Return what places the images and sounds of a request, which is to be released at the end of the request.

        Raises ``InvalidArgument`` where they cannot be read, ``Unavailable`` before the first engine serves.
        """
        from ..records.media import check_parts, check_used  # here: most requests have none

        assert isinstance(request.prompts, Chat)
        if (info := self._tokenizers.info) is not None and info.HasField("transcript"):
            raise _only_transcribes(request, self._context.model)
        chat, files, encoders = request.prompts, request.files, self._links.encoders
        check_parts(chat.media, self._links.view.limits, self._context.model, is_able=encoders is not None)
        for name, is_set in (
            ("truncate_prompt_tokens", request.truncate_prompt_tokens is not None),
            ("session", bool(request.before)),
        ):
            if is_set:
                raise errors.InvalidArgument(f"{name} is not available with images and sounds", name)
        assert encoders is not None
        of_body = {} if files is None else files.files
        check_used(of_body, chat.media)
        owner = encoders.owner(request.tenant.name, cache_salt(request), is_kept=request.keeps_files)
        return encoders.open(chat.media, of_body, owner, chat.media_options)

    async def prepare(self, request: GenerateRequest, media: "RequestMedia | None" = None) -> Prepared:
        """Wait for an engine and a tokenizer where none serves: the deadline of the request cancels the wait.

        ``media``: the request's images; None: it has none.
        Raises ``InvalidArgument`` for what cannot run, if possible before it is encoded.
        """
        context, view = self._context, self._links.view
        started_ns = context.clock()
        limits, info = view.limits or await view.wait_limits(), self._tokenizers.info
        assert info is not None, "without it there are no limits"
        if info.HasField("transcript") and sound_of(request.prompts) is None:
            raise _only_transcribes(request, context.model)
        if limits.HasField("generates") and not limits.generates:
            raise errors.InvalidArgument(NO_GENERATION.format(task_names(limits)), "model")
        sampling = _resolve(request, info, limits, context.random)
        if request.kv is not None:
            view.check_source(request.kv)
        priority = context.priority_of(request, limits) if request.priority or request.is_sheddable else 0
        beams = None if request.beam_search is None else plan_beams(request, request.beam_search, limits)
        keep = None if request.truncate_prompt_tokens is None else _num_kept(request, sampling, limits)
        check_sizes(request, info.max_token_bytes, limits, 1 if keep is None else _TRUNCATED_CONTEXTS)
        salt = cache_salt(request)
        # A chat's call is awaited here, and not in a coroutine of its own: each coroutine between the request's task
        # and the call runs whenever the task wakes.
        prompts: list[EncodedPrompt]
        sound: RestorableMedia | None = None
        turn: OpenTurn | None = None
        is_compared = request.compared is not None or request.keep_seconds
        if isinstance(request.prompts, Chat):
            chat = request.prompts
            if len(chat.token_ids) >= limits.max_model_len:  # refused before anything looks at its images
                no_params = types_pb2.SamplingParams()
                validation.check_prompt(chat.token_ids, no_params, limits, field=request.prompt_field)
            sizes: Sequence[tokenizer_pb2.MediaSize] = () if media is None else await media.put()
            if request.edits is None:
                encoding = self._tokenizers.encode_chat(chat, hash_salt=salt, tenant=request.tenant.name, media=sizes)
                rendered = (await encoding).prompt
            else:
                encode = self._encoder(salt, request.tenant.name, chat, sizes)
                chat, rendered = await request.edits.run(chat, encode)
            if request.reasoning_start:
                rendered.reasoning_start = request.reasoning_start
            prompts = [rendered]
            has_turns = chat.tools_json or chat.has_answers or request.session or is_compared
            if has_turns and keep is None and media is None:
                turn = await self._open_turn(request, chat, rendered, salt, info.eos_token_ids)
        else:
            prompts = await encode_prompts(self._tokenizers, request, request.prompts, keep, salt, limits)
            if request.reasoning_start:
                for prompt in prompts:
                    prompt.reasoning_start = request.reasoning_start
            sound = sound_of(request.prompts)
        if keep is not None:
            prompts = [truncated(prompt, keep) for prompt in prompts]
        if request.before:
            prompts = [continued(request.before, prompt) for prompt in prompts]
        is_hashed = isinstance(request.prompts, Chat) or sound is not None  # a sound's blocks are found by no other
        if turn is not None or keep is not None or request.before or not is_hashed:
            await add_hashes(prompts, view.block_size, salt)  # otherwise the tokenizer has done it
        if turn is not None:
            turn.hashes = rendered.block_hash_prefixes
        if request.bad_words:
            await forbid_words(self._tokenizers, request, sampling, limits)
        tokenize_ns = context.clock() - started_ns
        if len(prompts) > 1:
            check_copies(sampling, len(prompts))
        cost = RequestCost.of(sampling, limits, (len(prompts), request.num_samples), context.max_request_values)
        default = info.default_sampling_params.max_tokens
        submits: list[output_processor_pb2.Submit] = []
        num_prompt = num_output = 0
        for prompt in prompts:
            if submits:
                await asyncio.sleep(0)
            if beams is not None:
                packed_ids.unpack(prompt)  # its steps append to the list
            submit = _submit(request, prompt, sampling, limits, default, priority, cost, salt)
            if media is not None:
                _add_media(submit, prompt, chat, limits)
            elif sound is not None:
                submit.prompt.media.extend(prompt.media)
            submits.append(submit)
            num_prompt += len(prompt.token_ids) or packed_ids.num_ids(prompt)
            num_output += request.num_samples * submit.sampling_params.max_tokens
            if context.beside_engine:
                submit.preferred_engine = context.beside_engine
        cost.check(submits, limits)
        return Prepared(
            submits=submits,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            prompt_texts=await echoed_texts(self._tokenizers, request, prompts) if request.echo else (),
            opens_reasoning=prompts[0].reasoning_start == types_pb2.REASONING_START_OPEN,
            is_constrained_throughout=sampling.HasField("structured_outputs")
            and limits.reasoning != types_pb2.REASONING_MODE_FREE,
            started_ns=started_ns,
            tokenize_ns=tokenize_ns,
            clock=context.clock,
            beams=beams,
            turn=turn,
            media=media or sound,
            has_seed=request.sampling.HasField("seed"),
        )

    def _encoder(self, salt: bytes, tenant: str, whole: Chat, sizes: Sequence[tokenizer_pb2.MediaSize]) -> Encode:
        """Return what encodes a conversation of which parts were taken out. ``sizes``: of the images of the whole."""
        of_images = {id(part): size for part, size in zip(whole.media, sizes, strict=True)}

        async def encode(chat: Chat) -> tokenizer_pb2.TokenizedPrompt:
            media = [of_images[id(part)] for part in chat.media]
            return (await self._tokenizers.encode_chat(chat, hash_salt=salt, tenant=tenant, media=media)).prompt

        return encode

    async def _open_turn(
        self,
        request: GenerateRequest,
        chat: Chat,
        prompt: tokenizer_pb2.TokenizedPrompt,
        salt: bytes,
        ends: Sequence[int],
    ) -> OpenTurn | None:
        """Compare the prompt of a conversation with the turn before it; None if its turns are not remembered."""
        block_size, tenant = self._links.view.block_size, request.tenant.name
        if not block_size or request.num_samples > 1 or len(chat.messages_json) > MAX_CHAT_BYTES:
            return None

        async def decode(token_ids: Sequence[int]) -> str:
            return (await self._tokenizers.decode(token_ids, skip_special_tokens=False, tenant=tenant)).text

        keys = salt, b"" if request.adapter is None else request.adapter.digest
        named = TurnNames(request.answer, request.compared or "", request.session[:MAX_SESSION_NAME])
        turn = await self._turns.open(chat, prompt, tenant, keys, block_size, ends, decode, named)
        turn.is_kept = request.keep_seconds > 0
        return turn


def _only_transcribes(request: GenerateRequest, model: str) -> errors.InvalidArgument:
    message = f"the model {model!r} reads sounds only: send them to /v1/audio/transcriptions or /v1/audio/translations"
    return errors.InvalidArgument(message, request.prompt_field)


def _resolve(
    request: GenerateRequest,
    info: tokenizer_pb2.GetTokenizerInfoResponse,
    limits: types_pb2.ModelLimits,
    random: Random,
) -> types_pb2.SamplingParams:
    """Return the client's parameters over the model's defaults, checked, with a seed and the ids that end an output."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(info.default_sampling_params)
    sampling.ClearField("max_tokens")  # filled in when it is known how much room the prompt leaves
    sampling.MergeFrom(request.sampling)
    if request.text.stop:
        validation.check_text(request.text)
    # The samples of a beam search differ although they are not drawn.
    validation.check_sampling(sampling, limits, request.num_samples if request.beam_search is None else 1)
    if not sampling.HasField("seed"):
        # Drawn here and not by an engine: another engine that continues the request must draw the same tokens.
        sampling.seed = random.getrandbits(64)
    if not request.ignore_eos:
        for token_id in info.eos_token_ids:
            # A tokenizer may have more tokens than the model; such an id cannot be generated.
            if token_id < limits.vocab_size and token_id not in sampling.stop_token_ids:
                sampling.stop_token_ids.append(token_id)
    return sampling


def _submit(
    request: GenerateRequest,
    prompt: EncodedPrompt,
    sampling: types_pb2.SamplingParams,
    limits: types_pb2.ModelLimits,
    default_max_tokens: int,
    priority: int,
    cost: "RequestCost",
    salt: bytes,
) -> output_processor_pb2.Submit:
    """Return one prompt's request, checked; its ids and its timeout are filled in later. ``salt``: of its KV blocks."""
    submit = output_processor_pb2.Submit(
        prompt=prompt
        if isinstance(prompt, types_pb2.Prompt)
        else types_pb2.Prompt(
            token_ids=prompt.token_ids,
            packed_token_ids=prompt.packed_token_ids,
            reasoning_start=prompt.reasoning_start,
        ),
        block_hash_prefixes=() if isinstance(prompt, types_pb2.Prompt) else prompt.block_hash_prefixes,
        sampling_params=sampling,
        text=request.text,
        tenant=request.tenant.name,
        priority=priority,
        num_samples=request.num_samples if request.num_samples > 1 else 0,
        data_parallel_rank=request.data_parallel_rank,
        trace_headers=CURRENT.get(),
    )
    submit.prompt.cache_salt = salt
    if request.session:
        submit.session = session_digest(request)
    submit.keep_seconds = request.keep_seconds
    if request.kv is not None:
        submit.kv_transfer.CopyFrom(request.kv)
    if request.adapter is not None:
        submit.prompt.adapter = request.adapter.digest
    params, token_ids = submit.sampling_params, prompt.token_ids or packed_ids.ids_of(prompt)
    if not params.HasField("max_tokens"):
        validation.fill_max_tokens(
            params,
            len(token_ids),
            limits,
            chat=request.fills_context or isinstance(request.prompts, Chat),
            default=request.most_tokens or default_max_tokens,
            most=cost.default_tokens,
        )
    validation.check_prompt(token_ids, params, limits, field=request.prompt_field)
    if isinstance(prompt, types_pb2.Prompt):
        check_embeds(submit.prompt, params, limits)
    return submit


def _add_media(
    submit: output_processor_pb2.Submit, prompt: EncodedPrompt, chat: Chat, limits: types_pb2.ModelLimits
) -> None:
    from ..records.media import check_items  # here: most requests have none

    check_items(prompt.media, chat.media, limits, chat.places)
    submit.prompt.media.extend(prompt.media)


def _num_kept(request: GenerateRequest, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits) -> int:
    """Return how many tokens of a prompt are kept, as ``truncate_prompt_tokens`` of the request asks."""
    keep, most = request.truncate_prompt_tokens or 0, limits.max_model_len
    if keep == 0 or keep < -1:
        raise errors.InvalidArgument("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    if keep > most:
        raise errors.InvalidArgument(
            f"truncate_prompt_tokens is {keep}, more than the model's context of {most}", "truncate_prompt_tokens"
        )
    if keep > 0:
        return keep
    # ``most_tokens`` is lowered to what the prompt leaves. If it is as long as the context, no room is kept for it:
    # it would leave none for the prompt.
    room = sampling.max_tokens or (request.most_tokens if request.most_tokens < most else 0)
    return max(most - max(room, 1), 1)


def check_sizes(
    request: GenerateRequest, max_token_bytes: int, limits: types_pb2.ModelLimits, contexts: int = 1
) -> None:
    """Refuse texts that cannot become a prompt of so many contexts. ``max_token_bytes``: length of the longest token;
    0: unknown."""
    field, max_bytes = request.prompt_field, contexts * max_token_bytes * limits.max_model_len
    for text in (request.prompts.messages_json,) if isinstance(request.prompts, Chat) else request.prompts:
        if text == "":
            raise errors.InvalidArgument(f"{field} is empty; at least one token is needed", field)
        if max_bytes and isinstance(text, str | bytes) and len(text) > max_bytes:
            num_tokens = -(-len(text) // max_token_bytes)
            reason = f"{field} has at least {num_tokens}"
            raise errors.ContextLengthExceeded.of(num_tokens, limits.max_model_len, reason, field)


def cache_salt(request: GenerateRequest) -> bytes:
    """Return the salt of the hashes of a request's KV blocks. The client's own never reaches beyond its tenant, and no
    other adapter has the same."""
    salt = request.tenant.cache_salt
    if request.own_salt:
        salt = hashlib.blake2b(request.own_salt.encode(), key=salt, digest_size=SALT_BYTES).digest()
    return salt if request.adapter is None else adapter_salt(salt, request.adapter.digest)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Knows the factors of a request's cost, ``n * max_tokens * (1 + logprobs)``, and its limit.

    A value is a token or one of the alternatives that are returned with it. A client may send several prompts: then
    each counts.
    """

    num_prompts: int
    num_samples: int
    num_alternatives: int
    """Log probabilities to return with each token, in addition to its own."""
    most: int
    """The values that a request may have."""

    @classmethod
    def of(
        cls, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, outputs: tuple[int, int], most: int
    ) -> "RequestCost":
        """``outputs``: the number of prompts, and of samples of each."""
        named = min(sampling.logprobs, limits.vocab_size) if sampling.HasField("logprobs") else 0
        return cls(*outputs, named + len(sampling.logprob_token_ids), most)

    @property
    def default_tokens(self) -> int:
        """The most tokens of an output whose length the client leaves open."""
        return max(self.most // (self.num_prompts * self.num_samples * (1 + self.num_alternatives)), 1)

    def check(self, submits: Iterable[output_processor_pb2.Submit], limits: types_pb2.ModelLimits) -> None:
        """Raise ``InvalidArgument`` for outputs and prompts that have more values."""
        max_tokens = 0
        num_prompt_values = 0
        for submit in submits:
            params = submit.sampling_params
            max_tokens = max(max_tokens, params.max_tokens)
            if params.HasField("prompt_logprobs"):
                num_prompt_values += packed_ids.num_ids(submit.prompt) * min(params.prompt_logprobs, limits.vocab_size)
        if num_prompt_values > self.most:
            raise errors.InvalidArgument(
                f"prompt_logprobs asks for {num_prompt_values} log probabilities of the prompts; this gateway allows "
                f"{self.most} in a request (--max-request-values): lower prompt_logprobs, or send fewer or shorter "
                "prompts",
                "prompt_logprobs",
            )
        factors = {"n": self.num_samples, "max_tokens": max_tokens, "(1 + logprobs)": 1 + self.num_alternatives}
        if self.num_prompts > 1:
            factors = {"prompts": self.num_prompts} | factors
        product = self.num_prompts * self.num_samples * max_tokens * (1 + self.num_alternatives)
        if product > self.most:
            names = [name.removeprefix("(1 + ").rstrip(")") for name, factor in factors.items() if factor > 1]
            raise errors.InvalidArgument(
                f"{' * '.join(factors)} is {' * '.join(map(str, factors.values()))} = {product}; this gateway allows "
                f"{self.most} in a request (--max-request-values): lower {' or '.join(names)}",
                "n" if self.num_samples > 1 else "max_tokens",
            )
