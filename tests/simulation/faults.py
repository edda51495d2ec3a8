"""Makes things go wrong, and right again."""

import asyncio

from .mesh import Mesh
from .plan import Fault

KINDS = ("crash",)


async def inject(mesh: Mesh, fault: Fault) -> None:
    """Cause a fault when it is due, and undo it."""
    await asyncio.sleep(fault.at)
    part = mesh.parts[fault.target]
    if part.process is None:
        return  # another fault has it down
    part.kill()
    await asyncio.sleep(fault.lasts)
    await part.start()
