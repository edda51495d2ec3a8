"""Defaults of the gateway's limits. The command line imports them, so this module imports nothing of the mesh."""

from typing import Final

DEFAULT_QUEUE_SECONDS: Final = 10.0
"""A person who waits longer for the first word has often given up."""
ALWAYS_QUEUED: Final = 32
"""Outputs that may wait whatever the estimate says: few requests are no overload, and rates that were measured with few
are unreliable."""
DEFAULT_MAX_VALUES = 1 << 21
"""16,384 tokens of 128 samples, or 100,000 tokens with 20 alternatives each."""
DEFAULT_UNATTENDED_SECONDS: Final = 15.0
"""A client of ours notices a dead connection after 10 s at most; the gateway may have noticed it at once."""
