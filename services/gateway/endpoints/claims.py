"""Reads the headers by which a client resumes a stream, or repeats a request safely."""

from dataclasses import replace

from tokenloom.request.errors import InvalidArgument

from ..http.http_exchange import HttpExchange
from ..openai.body_reader import AnswerOptions
from ..openai.event_ids import FIELD, MAX_OUTPUTS, NO_EVENT, parse_event_id
from ..records.generate_request import Chat, GenerateRequest
from ..records.resume_token import NEW, ResumeToken, fingerprint, token_of_key, tokens_of

KEY_FIELD = "Idempotency-Key"


def read_claim(
    exchange: HttpExchange, body: bytes | bytearray, job: GenerateRequest, options: AnswerOptions
) -> tuple[AnswerOptions, ResumeToken]:
    """Return the options and the claim of a call, as its headers ask.

    Raises ``InvalidArgument`` for a header that is malformed, or that the request cannot have.
    """
    last_id, key = exchange.headers.get(b"last-event-id"), exchange.headers.get(b"idempotency-key")
    if last_id is None and key is None:
        return options, NEW
    # The path belongs to the body: the same JSON at another endpoint is another request.
    digest = fingerprint(exchange.path, body)
    claim = NEW if key is None else token_of_key(job.tenant.name, key.decode("latin-1"), digest, KEY_FIELD)
    if last_id is None:
        return options, claim
    text = last_id.decode("latin-1").strip()
    if text not in NO_EVENT:
        event = parse_event_id(text)
        if not options.stream:
            raise InvalidArgument(f"{FIELD} resumes streams only: the body must have stream set to true", FIELD)
        if len(event.entries) and max(event.entries) >= _num_outputs(job):
            raise InvalidArgument(f"{FIELD} is of an answer with more outputs than the body asks for", FIELD)
        delivered = tokens_of(event.positions)
        claim = ResumeToken(event.request_id, digest, resumes=True, num_delivered=delivered)
        return replace(options, event_ids=True, resumed=event), claim
    if not options.stream or _num_outputs(job) > MAX_OUTPUTS:
        return options, claim
    return replace(options, event_ids=True), claim if claim.fingerprint else ResumeToken(fingerprint=digest)


def _num_outputs(job: GenerateRequest) -> int:
    return (1 if isinstance(job.prompts, Chat) else len(job.prompts)) * job.num_samples
