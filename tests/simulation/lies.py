"""What processes say that are broken, or in wrong hands: some of their messages are changed where they arrive.

A lie about tokens is one that its receiver can notice: tokens that no model has, that are too many, missing, or not of
their request. Another token that a model could have drawn cannot be distinguished from the right one, nor can KV whose
owner says that it did not change. What engines report of their load has any field changed in any way.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.mutations import mutated
from tokenloom.v1.coordinator_pb2 import EngineReport, PickResults, Snapshot
from tokenloom.v1.engine_pb2 import EngineFrame, EngineInput, Finished
from tokenloom.v1.kv_transfer_pb2 import AcquireResponse, ReleaseResponse
from tokenloom.v1.output_processor_pb2 import ProcessFrame, RequestFinished
from tokenloom.v1.tokenizer_pb2 import EncodeChatResponse
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH, Hello

from .reference import VOCAB_SIZE
from .virtual_loop import Process

LIE_SHARE = 0.4
"""How many messages of a lying process are lies, of those that can be."""
_STRANGER = 900_000
"""Slots from here on are of no request."""
_NO_TOKENS = (VOCAB_SIZE, VOCAB_SIZE + 7, 1 << 31, (1 << 32) - 1)
_NO_REASONS = (0, 6, 7, 99)
"""UNSPECIFIED, PREFILLED, TOOL_CALLS, and one that there is not."""
_NO_HELLO = Hello()

Lie = Callable[[Any, Random], None]


class Lies:
    """Knows which processes lie, and changes what they send.

    Attributes:
        told: How many messages were changed, by their types.
    """

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self._liars: dict[Process, Random] = {}

    def begin(self, process: Process, random: Random) -> None:
        """Let a process lie from now on, as ``random`` says."""
        self._liars[process] = random

    def end(self, process: Process) -> None:
        """Let it be honest again, or forget it."""
        self._liars.pop(process, None)

    def hear(self, sender: Process, message: Any) -> Any:
        """Return what arrives of a message."""
        random = self._liars.get(sender)
        if random is None or (lies := _LIES.get(type(message))) is None:
            return message
        # A first message names its process: another one than was called is refused.
        if getattr(message, "hello", _NO_HELLO).ByteSize() or random.random() > LIE_SHARE:
            return message
        changed = type(message)()
        changed.CopyFrom(message)
        random.choice(lies)(changed, random)
        self.told[type(message).__name__] += changed != message
        return changed


def _no_token(frame: Any, random: Random) -> None:
    """Name a token that the model does not have."""
    if frame.token_ids:
        frame.token_ids[random.randrange(len(frame.token_ids))] = random.choice(_NO_TOKENS)


def _too_many(frame: Any, random: Random) -> None:
    """Send more tokens of a request than it may have, in columns that fit together."""
    if frame.slot:
        counts = list(frame.num_tokens) or [1] * len(frame.slot)
        frame.token_ids.extend([5] * 100_000)
        frame.ClearField("num_tokens")
        frame.num_tokens.extend([*counts[:-1], counts[-1] + 100_000])


def _torn(frame: Any, random: Random) -> None:
    """Lose the end of a column."""
    columns = [frame.slot, frame.token_index, frame.token_ids]
    if column := random.choice([each for each in columns if each] or [[]]):
        column.pop()


def _elsewhere(frame: Any, random: Random) -> None:
    """Leave tokens out."""
    # Never to an earlier place: it would be the right one if the lie before took a token away.
    if frame.slot:
        row = random.randrange(len(frame.slot))
        frame.token_index[row] = random.choice((frame.token_index[row] + 1, 1 << 31))


def _of_nobody(frame: Any, random: Random) -> None:
    """Send tokens of a request that there is not, in place of one that there is."""
    if frame.slot:
        frame.slot[random.randrange(len(frame.slot))] = _STRANGER + random.randrange(9)


def _wrong_end(frame: Any, random: Random) -> None:
    """End a request before its tokens have come, for no reason, or twice."""
    if frame.finished and random.random() < 0.5:
        frame.finished.add().CopyFrom(frame.finished[0])
    elif frame.slot:
        row = random.randrange(len(frame.slot))
        wrong = frame.token_index[row] + random.choice((2000, 1 << 31))
        if isinstance(frame, EngineFrame):
            end: Any = Finished(slot=frame.slot[row], reason=FINISH_REASON_LENGTH, num_output_tokens=wrong)
        else:
            sample = frame.sample_index[row] if frame.sample_index else 0
            end = RequestFinished(slot=frame.slot[row], reason=FINISH_REASON_LENGTH, sample_index=sample)
            end.completion_tokens = wrong
        frame.finished.append(end)


def _no_reason(frame: Any, random: Random) -> None:
    """End a request for a reason that there is not."""
    for finished in frame.finished:
        if not finished.HasField("error"):
            finished.reason = random.choice(_NO_REASONS)


def _other_sample(frame: Any, random: Random) -> None:
    """Name a sample that the request does not have."""
    if frame.slot:
        frame.ClearField("sample_index")
        frame.sample_index.extend([random.choice((2, 255, 1 << 31))] * len(frame.slot))


def _wild_step(frame: Any, random: Random) -> None:
    """Let the number of the step jump."""
    frame.step = random.choice((0, 1 << 63, frame.step + 1))


def _stranger_inputs(message: Any, random: Random) -> None:
    """Name requests that there are not, and ask for what no request may."""
    slot = _STRANGER + random.randrange(9)
    message.abort_slots.append(slot)
    message.stop_at.add(slot=slot, num_tokens=random.choice((0, 1 << 31)))
    message.accept.add(slot=slot, token_ids=[random.choice(_NO_TOKENS)])
    if message.add and random.random() < 0.5:
        wrong = mutated(message.add[0], random, 3)
        wrong.slot, wrong.request_id = slot, f"lie {random.getrandbits(32):x}"
        message.add.append(wrong)


def _wrong_prompt(answer: Any, random: Random) -> None:
    """Answer with a prompt that no text has."""
    prompt = answer.prompt
    change = random.choice(("token", "first part", "skipped", "packed"))
    if change == "token" and prompt.token_ids:
        prompt.token_ids[random.randrange(len(prompt.token_ids))] = random.choice(_NO_TOKENS)
    elif change == "first part":
        prompt.first_part_tokens = len(prompt.token_ids) + 1
    elif change == "skipped":
        prompt.skipped_tokens = (1 << 32) - 1
    else:
        prompt.packed_token_ids = random.choice((b"\0", b"\xff" * 4, b"\0" * 8))


def _wrong_blocks(answer: Any, random: Random) -> None:
    """Lend blocks that there are not, or name fewer of them, or generations that are no block's."""
    change = random.choice(("fewer", "beyond", "generation", "transport", "endpoint"))
    if change == "fewer" and answer.block_ids:
        answer.block_ids.pop()
    elif change == "beyond" and answer.block_ids:
        answer.block_ids[-1] = random.choice((1 << 20, (1 << 32) - 1))
    elif change == "generation" and answer.generations:
        answer.generations[-1] = random.choice((0, (1 << 64) - 1))
    elif change == "transport":
        answer.transport = "socket"
    else:
        answer.endpoint = b"nowhere"


def _wrong_release(answer: Any, random: Random) -> None:
    """Say that blocks have changed that have not, or give checksums of other ones."""
    if random.random() < 0.5:
        answer.valid, answer.reason = False, random.choice(("", "x" * 1000))
    else:
        answer.checksums.append(7)


def _wrong_snapshot(snapshot: Any, random: Random) -> None:
    """Send engines where they are not, as busy as they are not, or as another process; leave some out."""
    snapshot.revision = random.choice((0, snapshot.revision, (1 << 64) - 1))
    if snapshot.HasField("loads"):
        _anything(snapshot.loads, random)
    for entry in snapshot.engines:
        change = random.choice(("nothing", "address", "epoch", "load", "number"))
        if change == "address":
            entry.identity.address = entry.identity.kv_address = "unix:/simulation/nowhere"
        elif change == "epoch":
            entry.identity.epoch += 1
        elif change == "load":
            entry.report.running = entry.report.waiting = entry.score = random.choice((0, (1 << 32) - 1))
        elif change == "number":
            entry.number = random.choice((0, 1 << 31))
    if snapshot.engines and random.random() < 0.3:
        del snapshot.engines[random.randrange(len(snapshot.engines))]


def _wrong_picks(results: Any, random: Random) -> None:
    """Pick engines that there are not, answer more picks than were asked for, or fewer."""
    for result in results.result:
        if not result.HasField("response") or random.random() < 0.5:
            continue
        engine = result.response.engine
        change = random.choice(("address", "epoch", "name"))
        if change == "address":
            engine.address = "unix:/simulation/nowhere"
        elif change == "epoch":
            engine.epoch += 1
        else:
            engine.engine_id = "nobody"
    if results.result and random.random() < 0.3:
        results.result.append(results.result[0])
    elif results.result and random.random() < 0.3:
        results.result.pop()


def _anything(message: Any, random: Random) -> None:
    """Change any fields."""
    message.CopyFrom(mutated(message, random, random.randint(1, 3)))


_OF_TOKENS = (_no_token, _too_many, _torn, _elsewhere, _of_nobody, _wrong_end, _no_reason)
_LIES: Mapping[type, tuple[Lie, ...]] = {
    EngineFrame: (*_OF_TOKENS, _wild_step),
    ProcessFrame: (*_OF_TOKENS, _other_sample),
    EngineInput: (_stranger_inputs,),
    EngineReport: (_anything,),
    EncodeChatResponse: (_wrong_prompt,),
    AcquireResponse: (_wrong_blocks,),
    ReleaseResponse: (_wrong_release,),
    PickResults: (_wrong_picks,),
    Snapshot: (_wrong_snapshot,),
}
"""The lies by the types of the messages of engines, output processors, tokenizers and the coordinator."""
