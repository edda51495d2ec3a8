"""When an output only repeats itself."""

from collections.abc import Sequence

from ..wire.core_sampling_params import RepetitionDetection


def is_repeating(token_ids: Sequence[int], start: int, detection: RepetitionDetection) -> bool:
    """Whether ``token_ids[start:]`` ends with one pattern as often as ``detection`` says is too often."""
    num_tokens = len(token_ids) - start
    longest = min(detection.max_pattern_size, num_tokens // detection.min_count)
    for size in range(detection.min_pattern_size, longest + 1):
        # Nearly always the first comparison tells; a tail repeats a pattern of this size if it equals itself shifted.
        if token_ids[-1] == token_ids[-1 - size]:
            tail = token_ids[-size * detection.min_count :]
            if tail[size:] == tail[:-size]:
                return True
    return False
