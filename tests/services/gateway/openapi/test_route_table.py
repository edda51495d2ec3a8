"""A gateway serves what the table of routes has, and the document describes nothing else."""

from pathlib import Path

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.gateway.openapi.document import document
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
    settings = {"admin_api_key": ("k",), "batch_dir": socket_dir / "batches"}
    async with FakeMesh(socket_dir).gateway(**settings) as mesh:
        assert mesh.service is not None
        served = {(method, path) for path, methods in mesh.service.routes.items() for method in methods}
    single = {("GET", f"/v1/models/{MODEL}")}
    files = {each for each in served if each[1].startswith(PAGE_FILES)}
    assert served - files - single == {(route.method, route.pattern) for route in ROUTES}
