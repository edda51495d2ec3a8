"""The list of the fields whose values are built from large bodies."""

import importlib
import pkgutil

import msgspec
import pytest

from tokenloom.services import gateway
from tokenloom.services.gateway.openapi.batch_schemas import CreateBatchRequest, UploadFileRequest
from tokenloom.services.gateway.routes.api_routes import READ_FIELDS

OTHERS = {CreateBatchRequest, UploadFileRequest}
"""Bodies that another parser reads."""


def bodies() -> list[type[msgspec.Struct]]:
    """The bodies that any module of the gateway defines."""
    found: set[type[msgspec.Struct]] = set()
    for module in pkgutil.walk_packages(gateway.__path__, f"{gateway.__name__}."):
        if module.name.endswith("__main__"):
            continue
        values = vars(importlib.import_module(module.name)).values()
        found |= {each for each in values if isinstance(each, type) and issubclass(each, msgspec.Struct)}
    named = [each for each in found if each.__name__.endswith("Request") and each.__name__ != "FinishedRequest"]
    return sorted({*named} - OTHERS, key=lambda each: each.__name__)


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.__name__)
def test_a_large_body_keeps_each_field_that_is_read(body: type[msgspec.Struct]) -> None:
    assert not set(body.__struct_fields__) - READ_FIELDS
