"""docker-compose.yml against the Dockerfile, the settings of the services, and the manifests for Kubernetes."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from tests.k8s import test_manifests
from tests.k8s.cluster import WHOLE, build, workloads
from tokenloom.cli.main import app
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.host.options import options_of
from tokenloom.supervisor.certificates import PARTS as CERTIFICATES

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
SETTINGS = test_manifests.SETTINGS | {"encoder": EncoderSettings, "relay": RelaySettings}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGES = {f"tokenloom/{target}:{VERSION}" for target in ("service", "engine-cpu", "engine-cuda")}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
HOST: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "compose.host.yml").read_text())
OURS = {name: part for name, part in COMPOSE["services"].items() if part["image"].startswith("tokenloom/")}
JOBS = ("certs", "model")
PARTS = {name: part for name, part in OURS.items() if name not in JOBS}
READERS = {name for name, part in PARTS.items() if "TOKENLOOM_MODEL" in part["environment"]}
"""The parts that read the model's files."""


def mounts(part: dict[str, Any]) -> dict[str, str]:
    """Return the target of each volume or folder that a container mounts."""
    found = {}
    for mount in part.get("volumes", ()):
        source, target = re.fullmatch(r"(\$\{[^}]*\}|[^:]*):([^:]*)(?::ro)?", mount).groups()  # type: ignore[union-attr]
        found[source] = target
    return found


def target_of(image: str) -> str:
    return image.removeprefix("tokenloom/").partition(":")[0]


def service_of(part: dict[str, Any]) -> str:
    return str(part["command"][0]).removeprefix("tokenloom.services.").replace("_", "-")


def documented_commands() -> list[list[str]]:
    """Return the words of each ``docker compose … up`` of the file's head, the README and the quick start."""
    texts = [(ROOT / path).read_text() for path in ("docker-compose.yml", "README.md", "docs/start/quickstart.md")]
    found = [re.findall(r"^[#$] +(?:\w+=\S+ )*docker compose (.*\bup\b[^#\n]*)", text, re.MULTILINE) for text in texts]
    assert all(found)
    return [command.split() for commands in found for command in commands]


@pytest.mark.parametrize("command", documented_commands(), ids=" ".join)
def test_a_documented_command_starts_what_its_parts_wait_for(command: list[str]) -> None:
    profiles = {command[at + 1] for at, word in enumerate(command) if word == "--profile"}
    usual = [name for name, part in COMPOSE["services"].items() if set(part.get("profiles", ())) <= profiles]
    started = [word for word in command[command.index("up") + 1 :] if not word.startswith("-")] or usual
    mounted = {source for name in started for source in mounts(COMPOSE["services"][name])}
    assert not any(volume.startswith("tls-") for volume in mounted) or "certs" in started
    assert not any(name in READERS for name in started) or "model" in started
    # A mesh answers when each of its kinds of parts runs.
    assert {service_of(OURS[name]) for name in started if name in PARTS} - {"encoder", "relay"} == set(
        test_manifests.SETTINGS
    )


def test_every_image_is_a_target_of_the_dockerfile() -> None:
    used = {part["image"] for part in OURS.values()}
    used |= {workload.container["image"] for overlay in WHOLE for workload in workloads(build(overlay))}
    assert used == IMAGES
    assert {target_of(image) for image in IMAGES} <= TARGETS
    for part in OURS.values():
        assert part.get("build", {}).get("target", target_of(part["image"])) == target_of(part["image"])


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
    assert "depends_on" not in part  # parts wait for each other, and for the model's files, by themselves
    assert ("entrypoint" in part) == (name in READERS)


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
        certificate = settings.certificate
        assert certificate is not None
        names = ["ca.crt", "tls.crt", "tls.key"]
        assert [path.relative_to(mounts(part)[f"tls-{service_of(part)}"]).name for path in certificate.paths] == names


SECRETS = {
    **{name: {f"tls-{service_of(part)}"} for name, part in PARTS.items()},
    "certs": {f"tls-{part.replace('_', '-')}" for part in CERTIFICATES},
    "prometheus": {"tls-prometheus"},
}
"""The volumes of secrets that each container mounts; all other containers mount none. A secret of one part, such as
the gateway's, is added to that part's line only."""


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_sees_its_own_secrets_only(name: str) -> None:
    mounted = set(mounts(COMPOSE["services"][name]))
    folders = {volume for volume in mounted if volume.startswith((".", "$"))}
    assert mounted - folders - {"hub"} == SECRETS.get(name, set())
    assert ("hub" in mounted) == (name in READERS or name == "model")
    assert any("HF_TOKEN_FILE" in folder for folder in folders) == (name == "model")
    assert "secrets" not in COMPOSE["services"][name]


def test_one_job_downloads_the_model_where_the_parts_look_for_it() -> None:
    job = COMPOSE["services"]["model"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert job["command"] == ["tokenloom.cli.main", "fetch", "${MODEL:-tokenloom-demo}"]
    assert job["environment"]["HF_HUB_OFFLINE"] == "0"
    assert mounts(job)["hub"] == "/hub"
    assert "ENV HF_HUB_CACHE=/hub HF_HUB_OFFLINE=1\n" in dockerfile
    assert re.search(
        r"chown -R 10001:10001 \S+ \S+ /hub$", dockerfile, re.MULTILINE
    )  # an empty volume takes this owner
    for part in (job, *(PARTS[name] for name in READERS)):
        assert part["working_dir"] == mounts(part)["${MODEL_DIR:-.}"] == "/models"
    for name in READERS:
        assert 'fetch "$$TOKENLOOM_MODEL" --wait' in PARTS[name]["entrypoint"][2]
        assert PARTS[name]["environment"]["TOKENLOOM_MODEL"] == "${MODEL:-tokenloom-demo}"
        assert "hub:/hub:ro" in PARTS[name]["volumes"]


def test_every_volume_is_accounted_for() -> None:
    assert set(COMPOSE["volumes"]) == set().union(*SECRETS.values()) | {"hub"}


def test_the_job_fills_each_volume_with_one_parts_files_and_keeps_no_authority(tmp_path: Path) -> None:
    """What ``certs`` runs, with its folder for the mount points of its volumes."""
    job = COMPOSE["services"]["certs"]
    _, command, folder, *options = job["command"]
    result = CliRunner().invoke(app, [command, str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    points = {Path(target).relative_to(folder): volume for volume, target in mounts(job).items()}
    assert {path.relative_to(tmp_path) for path in tmp_path.iterdir()} == set(points)
    for path, volume in points.items():
        assert volume == f"tls-{path}"
        assert {each.name for each in (tmp_path / path).iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    keys = [file.read_bytes() for file in tmp_path.rglob("*.key")]
    authority = x509.load_pem_x509_certificate((tmp_path / "engine" / "ca.crt").read_bytes())
    for key in keys:
        loaded = serialization.load_pem_private_key(key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        assert loaded.public_key() != authority.public_key()


def test_the_image_has_a_mount_point_for_each_volume_of_the_job() -> None:
    """An empty volume takes its owner from the image's folder; otherwise the job could not write to it."""
    (made,) = re.findall(r"for part in ([^;]*);[^/]*mkdir -p \"(\S+)/\$part\"", (ROOT / "Dockerfile").read_text())
    targets = set(mounts(COMPOSE["services"]["certs"]).values())
    assert {f"{made[1]}/{part}" for part in made[0].split()} == targets


def test_addresses_name_services_of_the_file() -> None:
    named = re.compile(r"^(?:dns:///)?([a-z][a-z-]*)(?::\d+)?$")
    values = [value for part in PARTS.values() for key, value in part["environment"].items() if "ADVERTISE" in key]
    values += [PARTS["gateway"]["environment"][key] for key in ("TOKENLOOM_TOKENIZERS", "TOKENLOOM_COORDINATOR")]
    for value in values:
        match = named.match(value)
        assert match is not None
        assert match[1] in PARTS, value


def test_only_what_faces_clients_is_published_and_only_to_this_machine() -> None:
    for name, part in PARTS.items():
        published = part.get("ports", [])
        assert bool(published) == (name in ("gateway", "relay"))
        assert all(port.startswith("127.0.0.1:") for port in published)
