"""Checks how many files the processes of a mesh may have open."""

import resource

from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.runtime.host import descriptors

from .refusal import CannotServe

_OWN = 32
_FOR_EACH_PART = 4
"""Files that the supervisor has open, by itself and for each part: its output, its process and its health."""


def check_open_files(num_parts: int) -> None:
    """Raise `CannotServe` if the limit of open files is too low for a part, or for the supervisor of so many parts.

    Each process raises its soft limit to the hard one, which therefore decides for a part.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        descriptors.check_limit(hard)
        descriptors.check_limit(soft, _OWN + _FOR_EACH_PART * num_parts)
    except FailedPrecondition as error:
        raise CannotServe(error.message) from None
