"""Derives the seeds of the samples of one prompt."""

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index`` of a request with ``seed``; seeds are unsigned 64-bit integers.

    Sample 0 draws the same tokens as a request for one sample. The others get SplitMix64's output function (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014), a bijection, so their seeds all differ.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
