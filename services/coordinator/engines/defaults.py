"""Defaults of the coordinator's settings. The command line imports them, so this module imports nothing of ours."""

from typing import Final

PD_THRESHOLD = 128
"""As many prompt tokens as a CPU engine computes in a step alongside decodes: a shorter prompt delays others by one
step at most, and a pair costs more than that."""
PLACEMENT: Final = "score"
"""The rule by which engines are compared: one that an operator can compute from two counts."""
PLACEMENTS = ("score", "cost")
"""The rules that are built in."""
LEAST_FACTOR = 1.2
"""By which engines must differ before requests move: the counts of equally loaded ones differ by some percent."""
SETTLE_SECONDS = 2.0
"""How long a new coordinator waits for engines to re-join before it calls its view complete."""
PREFIX_INDEX_MIB = 256
"""Enough for 7 to 14 million different blocks, wherever they are cached; 4 to 8 million if evictions are followed."""
