"""Streaming input: sessions whose prompt continues after each answer (``resumable``, as in vLLM V1)."""

from collections import deque
from collections.abc import Iterable

import msgspec

from ..data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from ..scheduling.scheduler import Scheduler

MAX_INPUTS = 1024
"""Limits the inputs of a session that wait for their turns, because a faulty client may only send."""

_ENDS_A_TURN = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class _Session:
    """Holds the state of a session.

    ``tokens`` are the prompt and output of the current or the latest turn, ``turn_id`` names the request of the current
    one, and ``has_output`` says whether it has any output yet.
    """

    __slots__ = ("has_output", "inputs", "is_closing", "num_turns", "request_id", "tokens", "turn_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.inputs: deque[EngineCoreRequest] = deque()  # at most MAX_INPUTS
        self.turn_id: str | None = None
        self.num_turns = 0
        self.has_output = False
        self.is_closing = False


class Sessions:
    """Runs each turn of a session as an ordinary request with an id of its own: all earlier turns and the new input.

    So a session between turns holds neither blocks nor a row; its KV is hit again unless it was evicted. As in vLLM, a
    turn's last token, whose KV was never computed, is not part of what the next turn continues; except where a grammar
    ended the turn without a stop token, because that token belongs to its text.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.live: dict[str, _Session] = {}  # by request id; as many as clients keep open
        self._by_turn: dict[str, _Session] = {}

    def add(self, message: EngineCoreRequest) -> None:
        """Add the first input of a session, or a further one, which waits for the end of the turns before it.

        An input that is not ``resumable`` is the last; without a prompt it only closes the session: at the end of the
        current turn, or at once and without an output. Raises ``ValueError``, and ends the session, for an input that
        is refused.
        """
        session = self.live.get(message.request_id)
        if error := _refusal(message, session):
            self._scheduler.abort_requests(self.abort([message.request_id]))
            raise ValueError(error)
        if session is None:
            session = self.live[message.request_id] = _Session(message.request_id)
        session.inputs.append(message)
        if session.turn_id is None:
            self._begin_turn(session)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End the sessions among these requests. Returns the ids, with those of sessions replaced by their turns'."""
        names: list[str] = []
        for request_id in request_ids:
            session = self.live.pop(request_id, None)
            if session is None:
                names.append(request_id)
            elif session.turn_id is not None:
                del self._by_turn[session.turn_id]
                names.append(session.turn_id)
        return names

    def take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Rename the outputs of turns to their sessions; begin the next turn of a session whose turn ended."""
        for output in outputs:
            if (session := self._by_turn.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None:
                del self._by_turn[output.request_id]
            output.request_id = session.request_id
            session.tokens += output.new_token_ids
            session.has_output = session.has_output or bool(output.new_token_ids)
            if output.finish_reason is not None:
                self._end_turn(session, output)

    def _begin_turn(self, session: _Session) -> None:
        message = session.inputs.popleft()
        session.is_closing = not message.resumable
        if session.is_closing and not message.prompt_token_ids:
            del self.live[session.request_id]
            return
        session.num_turns += 1
        # NUL keeps a turn's name apart from every key that a client chooses.
        session.turn_id = f"{session.request_id}\0{session.num_turns}"
        self._by_turn[session.turn_id] = session
        # vLLM keeps one request and its blocks between turns, with a seat in the batch and memory that nothing can
        # preempt. Here an idle session is a list of tokens, and the prefix cache finds its blocks.
        prompt = session.tokens + message.prompt_token_ids
        session.tokens = prompt + message.accepted_token_ids
        session.has_output = bool(message.accepted_token_ids)
        turn = msgspec.structs.replace(
            message,
            request_id=session.turn_id,
            prompt_token_ids=prompt,
            arrival_ns=0,  # it is queued from now on: before, it waited for its own session
        )
        self._scheduler.add_request(turn)

    def _end_turn(self, session: _Session, output: EngineCoreOutput) -> None:
        session.turn_id = None
        if session.is_closing or output.finish_reason not in _ENDS_A_TURN:
            del self.live[session.request_id]
            return
        # Without a stop token it was a grammar that ended the turn, after the last token of its text.
        is_whole = output.finish_reason is FinishReason.STOP and output.stop_token_id is None
        if session.has_output and not is_whole:
            del session.tokens[-1]
        if session.inputs:
            self._begin_turn(session)


def _refusal(message: EngineCoreRequest, session: _Session | None) -> str:
    """Return why a session cannot have this input; empty if it can."""
    if message.lease_id or message.remote_kv is not None or message.awaits_tokens:
        return "a resumable request cannot exchange KV with other engines"
    if message.prompt_embeds:
        return "a resumable request cannot have prompt_embeds"
    if message.media:
        return "a resumable request cannot have images"
    if session is not None and len(session.inputs) >= MAX_INPUTS:
        return f"{MAX_INPUTS} inputs of the session wait already"
    return ""
