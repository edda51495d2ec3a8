"""docker-compose.yml against the Dockerfile, the settings of the services, and the manifests for Kubernetes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.cluster import WHOLE, build, workloads
from tests.k8s.test_manifests import SETTINGS
from tokenloom.services.runtime.host.options import options_of

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
IMAGES = {f"tokenloom/{target}" for target in ("service", "engine-cpu", "engine-cuda")}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
HOST: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "compose.host.yml").read_text())
OURS = {name: part for name, part in COMPOSE["services"].items() if part["image"].startswith("tokenloom/")}
PARTS = {name: part for name, part in OURS.items() if name != "certs"}


def service_of(part: dict[str, Any]) -> str:
    return str(part["command"][0]).removeprefix("tokenloom.services.").replace("_", "-")


def test_every_image_is_a_target_of_the_dockerfile() -> None:
    used = {part["image"] for part in OURS.values()}
    used |= {workload.container["image"] for overlay in WHOLE for workload in workloads(build(overlay))}
    assert used == IMAGES
    assert {image.removeprefix("tokenloom/") for image in IMAGES} <= TARGETS
    for part in OURS.values():
        assert part.get("build", {}).get("target", part["image"].partition("/")[2]) == part["image"].partition("/")[2]


def test_every_image_is_built_by_somebody() -> None:
    assert {part["image"] for part in OURS.values() if "build" in part} == IMAGES


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_closed_in_and_checked(name: str) -> None:
    part = PARTS[name]
    assert part["read_only"] is True
    assert part["cap_drop"] == ["ALL"]
    assert part["security_opt"] == ["no-new-privileges:true"]
    assert part["restart"] == "unless-stopped"
    assert part["healthcheck"]["test"] == ["CMD", "python", "-m", "tokenloom.services.runtime.host.probe"]
    assert "depends_on" not in part  # parts wait for each other by themselves


@pytest.mark.parametrize("name", PARTS)
def test_settings_are_accepted_here_and_on_the_hosts_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PARTS[name]
    settings_class = SETTINGS[service_of(part)]
    fields = {option.variable for option in options_of(settings_class).values()}
    for environment in (
        part["environment"],
        part["environment"] | HOST["services"].get(name, {}).get("environment", {}),
    ):
        assert set(environment) <= fields
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value))
            settings = settings_class.load(part["command"][1:])
        assert settings.certificate is not None
        assert settings.certificate.cert.name == f"{service_of(part)}.crt"


def test_addresses_name_services_of_the_file() -> None:
    named = re.compile(r"^(?:dns:///)?([a-z][a-z-]*)(?::\d+)?$")
    values = [value for part in PARTS.values() for key, value in part["environment"].items() if "ADVERTISE" in key]
    values += [PARTS["gateway"]["environment"][key] for key in ("TOKENLOOM_TOKENIZERS", "TOKENLOOM_COORDINATOR")]
    for value in values:
        match = named.match(value)
        assert match is not None
        assert match[1] in PARTS, value


def test_only_the_gateway_is_published_and_only_to_this_machine() -> None:
    for name, part in PARTS.items():
        published = part.get("ports", [])
        assert bool(published) == (name == "gateway")
        assert all(port.startswith("127.0.0.1:") for port in published)
