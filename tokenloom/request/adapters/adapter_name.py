"""Checks the names under which LoRA adapters are served. This module imports neither gRPC nor protobuf."""

import re

from ..errors import InvalidArgument

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?")


def check_adapter_name(name: str, field: str) -> str:
    """Return the name. Raises ``InvalidArgument`` naming ``field`` for one that is empty, long or ambiguous.

    A colon separates a model's name from its adapter's, so an adapter's own name has none.
    """
    if len(name) <= MAX_NAME and ".." not in name and _NAME.fullmatch(name):
        return name
    raise InvalidArgument(
        f"{field} must be 1 to {MAX_NAME} letters, digits, '.', '_', '-' and '/', begin and end with a letter or a "
        "digit, and not contain '..'",
        field,
    )
