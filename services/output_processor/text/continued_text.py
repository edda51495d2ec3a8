"""Makes the text of tokens that come in several calls, between which the caller keeps what the next one depends on."""

import asyncio
from collections.abc import Sequence
from itertools import chain, islice

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.validation import check_text
from tokenloom.v1.output_processor_pb2 import DetokenizeRequest, DetokenizeResponse, TextOptions

from .detokenizer import Match, StopStrings, open_text_stream
from .vocabulary import Vocabulary

MAX_TOKENS = 4096
"""New tokens of a call: a few milliseconds."""
MAX_SINGLES = 1 << 16
"""Tokens of a call whose own bytes are wanted."""
_TABULATED_PER_TURN, _OTHERS_PER_TURN = 512, 32
"""Tokens that become text before the event loop serves the streams: less than a millisecond."""
_SINGLES_PER_TURN = 4096

_CONTEXT = 16  # tokens that have text: more than a stream looks back at its begin


class ContinuedText:
    """Makes the text of an output in several calls, between which its caller keeps ``context_ids`` and ``held``.

    Attributes:
        context_ids: The last tokens, those without text left out.
        stop_string: The one that was found; None: none, so far.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        context_ids: Sequence[int],
        held: str,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str: bool = False,
        skip_special: bool = True,
        spaces_between_special: bool = True,
    ) -> None:
        """``context_ids``, ``held``: of the call before; at first, the end of the prompt and an empty text.
        ``min_tokens``: of the new tokens, that complete no stop string."""
        self._vocabulary, self._skip = vocabulary, skip_special
        self._stream = open_text_stream(
            vocabulary, context_ids, skip_special, spaces_between_special_tokens=spaces_between_special
        )
        self._stop = StopStrings(stop, include_stop_str, held) if stop else None
        self._num_early, self._is_early = min_tokens, min_tokens > 0
        self.stop_string: str | None = None
        self.context_ids = self._with_text(context_ids)

    @property
    def held(self) -> str:
        """Return text that may begin a stop string."""
        return "" if self._stop is None or self.stop_string is not None else self._stop.held

    def push(self, token_ids: Sequence[int]) -> str:
        """Return text that can be shown now; none after a stop string."""
        texts: list[str] = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self._is_early, self._num_early = self._num_early > 0, self._num_early - 1
            if text := self._stream.push(token_id):
                texts.append(self._shown(text))
        self.context_ids = self._with_text(self.context_ids, token_ids)
        return "".join(texts)

    def finish(self) -> str:
        """Return the rest of the text at the end of the output."""
        if self._has_stopped():
            return ""
        rest = self._shown(self._stream.finish())
        if self._stop is None:
            return rest
        if not self._has_stopped():
            return rest + self._stop.finish()
        self.stop_string = None  # the text ends there, but the output has ended for another reason, as in Detokenizer
        return rest

    def _has_stopped(self) -> bool:
        return self.stop_string is not None

    def _shown(self, text: str) -> str:
        if self._stop is None:
            return text
        if self._is_early:
            return self._stop.pass_over(text)
        found = self._stop.feed(text)
        if isinstance(found, Match):
            self.stop_string = found.stop_string
            return found.text
        return found

    def _with_text(self, *parts: Sequence[int]) -> list[int]:
        """Return the last tokens of all parts, however many without text follow them."""
        backwards = chain.from_iterable(map(reversed, reversed(parts)))
        seen = (each for each in backwards if not self._vocabulary.is_blank(each, self._skip))
        return list(islice(seen, _CONTEXT))[::-1]


async def detokenize(vocabulary: Vocabulary, request: DetokenizeRequest) -> DetokenizeResponse:
    """Answer ``OutputProcessor.Detokenize``. Raises ``InvalidArgument``."""
    token_ids, options = list(request.token_ids), request.text
    if len(token_ids) > MAX_TOKENS or len(request.single_ids) > MAX_SINGLES:
        limits = f"{MAX_TOKENS} tokens and {MAX_SINGLES} single ones"
        raise InvalidArgument(f"a call may have at most {limits}; send the rest in others", "token_ids")
    check_text(options)
    text = _continued(vocabulary, request, options)
    per_turn = _TABULATED_PER_TURN if vocabulary.is_tabulated else _OTHERS_PER_TURN
    parts: list[str] = []
    for start in range(0, len(token_ids), per_turn):
        if start:
            await asyncio.sleep(0)
        parts.append(text.push(token_ids[start : start + per_turn]))
    if request.ends:
        parts.append(text.finish())
    response = DetokenizeResponse(
        text="".join(parts), context_ids=text.context_ids, held_text=text.held, stop_string=text.stop_string
    )
    singles = list(request.single_ids)
    for start in range(0, len(singles), _SINGLES_PER_TURN):
        if start:
            await asyncio.sleep(0)
        response.single_bytes.extend(map(vocabulary.token_bytes, singles[start : start + _SINGLES_PER_TURN]))
    return response


def _continued(vocabulary: Vocabulary, request: DetokenizeRequest, options: TextOptions) -> ContinuedText:
    skip = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
    spaces = options.spaces_between_special_tokens if options.HasField("spaces_between_special_tokens") else True
    return ContinuedText(
        vocabulary,
        list(request.context_ids),
        request.held_text,
        stop=options.stop,
        min_tokens=request.min_tokens,
        include_stop_str=options.include_stop_str_in_output,
        skip_special=skip,
        spaces_between_special=spaces,
    )
