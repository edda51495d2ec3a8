"""The simulated mesh, whose tasks run in any order: resumable requests, their journals, output processors, engines."""

from dataclasses import replace
from random import Random

from tests.explorer.world import World
from tests.simulation.network import Network
from tests.simulation.plan import LINK_FAULTS, make_plan
from tests.simulation.runner import Result, simulate

NUM_REQUESTS = 4
NUM_FAULTS = 2


class MeshScenario:
    """Clients send, cancel and resume requests while links are cut; the invariants are those of the simulation."""

    uses_disk = False

    async def run(self, world: World) -> None:
        plan = make_plan(world.random.randrange(1 << 30), LINK_FAULTS)
        plan = replace(plan, asks=plan.asks[:NUM_REQUESTS], faults=plan.faults[:NUM_FAULTS])
        network = Network(world.loop, Random(f"network {plan.seed}"), plan.mean_delay)
        result = Result(plan)
        await simulate(network, plan, result)
        for violation in result.violations:
            world.violated(violation)

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")
