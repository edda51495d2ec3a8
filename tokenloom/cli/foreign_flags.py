"""The flags of vLLM that Tokenloom does not have, for the reference page about them."""

from tokenloom.services.runtime.host.foreign_flags import ForeignFlag as ForeignFlag
from tokenloom.services.runtime.host.foreign_flags import foreign_flags as foreign_flags
