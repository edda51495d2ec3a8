"""Compares an answer with that of an undisturbed run."""

from .answer import Answer, Sample


def difference(expected: Answer, found: Answer, tolerance: float) -> str | None:
    """Return the first difference in words; None: the answers are equal.

    Log probabilities may differ by ``tolerance``: a step with other neighbours rounds differently.
    """
    if expected.samples.keys() != found.samples.keys():
        return f"samples {sorted(found.samples)} instead of {sorted(expected.samples)}"
    for index, sample in sorted(expected.samples.items()):
        if (difference := _difference(sample, found.samples[index], tolerance)) is not None:
            return f"sample {index}: {difference}"
    if expected.completion_tokens != found.completion_tokens:
        return f"usage counts {found.completion_tokens} tokens instead of {expected.completion_tokens}"
    return None


def _difference(expected: Sample, found: Sample, tolerance: float) -> str | None:
    if expected.token_ids != found.token_ids:
        return _token_difference(expected.token_ids, found.token_ids)
    if expected.text != found.text:
        return f"text {_around(expected.text, found.text)}"
    for name in ("finish_reason", "stop_reason", "tool_calls"):
        if getattr(expected, name) != getattr(found, name):
            return f"{name} {getattr(found, name)!r} instead of {getattr(expected, name)!r}"
    if len(expected.logprobs) != len(found.logprobs):
        return f"{len(found.logprobs)} log probabilities instead of {len(expected.logprobs)}"
    for position, (one, other) in enumerate(zip(expected.logprobs, found.logprobs, strict=True)):
        if not abs(one - other) <= tolerance:
            return f"log probability {position} is {other:.4f} instead of {one:.4f}"
    return None


def _token_difference(expected: list[int], found: list[int]) -> str:
    same = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    if same is None:
        return f"{len(found)} tokens instead of {len(expected)}, equal as far as both go"
    return f"token {same} is {found[same]} instead of {expected[same]} ({len(found)} tokens instead of {len(expected)})"


def _around(expected: str, found: str) -> str:
    at = next(
        (i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other),
        min(len(expected), len(found)),
    )
    part = slice(max(at - 10, 0), at + 20)
    return f"{found[part]!r} instead of {expected[part]!r} at character {at}"
