"""A utility call of the core, its failures being this service's errors."""

from tokenloom.engine_core.client.async_core_client import AsyncClient
from tokenloom.engine_core.errors import EngineDeadError, UtilityError
from tokenloom.request.errors import FailedPrecondition, Unavailable


async def call_core(client: AsyncClient, method: str, *args: object) -> object:
    """What the core answers. Raises ``FailedPrecondition`` with the core's words, ``Unavailable`` when it is dead."""
    try:
        return await client.call_utility(method, *args)
    except UtilityError as error:
        raise FailedPrecondition(str(error)) from None
    except EngineDeadError:
        raise Unavailable("the engine failed") from None
