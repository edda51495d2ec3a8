"""A pair of calls each day, with a kill at two moments of each; ``make soak`` tries ten moments of all of them."""

import time

from tests.soak import administration

SECONDS_OF_DAY = 86400


async def test_engines_come_to_be_as_an_operator_wants_whatever_is_killed() -> None:
    """Within which time is judged by ``make soak`` only: this machine may be busy."""
    pair = int(time.time() // SECONDS_OF_DAY) % administration.NUM_PAIRS  # each day samples another one
    await administration.run(2, [pair])
