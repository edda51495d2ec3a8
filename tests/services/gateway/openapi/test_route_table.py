"""A gateway serves what the table of routes has, and the document describes nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.gateway.openapi.document import EXAMPLES, document
from tokenloom.services.gateway.openapi.route_table import ROUTES
from tokenloom.services.gateway.page.page_routes import PAGE_FILES


def test_each_route_stands_there_once() -> None:
    assert len({(route.method, route.pattern) for route in ROUTES}) == len(ROUTES)


def test_who_may_call_a_path_does_not_depend_on_the_method() -> None:
    kinds = {(route.pattern, route.is_open, route.is_admin) for route in ROUTES}
    assert len(kinds) == len({route.pattern for route in ROUTES})


def test_no_documented_route_is_forgotten_by_the_document() -> None:
    paths = document(admin=True, embeds=True, batches=True)["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert documented == {(route.method, route.path) for route in ROUTES if route.summary}


async def test_a_gateway_serves_the_table(socket_dir: Path) -> None:
    settings = {"admin_api_key": ("k",), "batch_dir": socket_dir / "batches", "page_kills": socket_dir / "control.sock"}
    async with FakeMesh(socket_dir).gateway(**settings) as mesh:
        assert mesh.service is not None
        served = {(method, path) for path, methods in mesh.service.routes.items() for method in methods}
    single = {("GET", f"/v1/models/{MODEL}")}
    files = {each for each in served if each[1].startswith(PAGE_FILES)}
    assert served - files - single == {(route.method, route.pattern) for route in ROUTES}


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from parts(each)


@pytest.mark.parametrize("embeds", [False, True])
def test_no_schema_has_what_generators_of_clients_misread(embeds: bool) -> None:
    api = document(admin=True, embeds=embeds, batches=True)
    for part in parts(api["components"]["schemas"]):
        assert part.get("default", "") is not None, part
        assert not isinstance(values := part.get("enum"), list) or None not in values, part
        is_bare = part.get("type") == "object" and not part.keys() & {"properties", "anyOf", "additionalProperties"}
        assert not is_bare, part


def test_each_default_is_a_value_of_its_schema() -> None:
    api = document(admin=True, embeds=True, batches=True)
    for part in parts(api["components"]["schemas"]):
        if "default" in part and not isinstance(part["default"], dict):
            jsonschema.validate(part["default"], {**part, "components": api["components"]})


def test_each_example_is_a_body_of_its_route() -> None:
    api = document(admin=True, embeds=False, batches=True)
    contents = [
        content
        for methods in api["paths"].values()
        for operation in methods.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
    ]
    examples = [content for content in contents if "example" in content]
    assert len(examples) == len(EXAMPLES)
    for content in examples:
        jsonschema.validate(content["example"], {**content["schema"], "components": api["components"]})


def test_each_operation_has_a_group_that_is_described_and_an_id_of_its_own() -> None:
    api = document(admin=True, embeds=True, batches=True)
    operations = [operation for methods in api["paths"].values() for operation in methods.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == {tag["name"] for tag in api["tags"]}
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert api["servers"] == [{"url": "/", "description": "This gateway."}]
    assert {"/api/chat", "/mesh", "/traffic"} <= api["paths"].keys()
