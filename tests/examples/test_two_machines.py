"""The scripts of the tutorial use options that exist, and start every kind of part."""

import re
import subprocess
from pathlib import Path

import pytest

from tokenloom.reference.service_pages import SERVICES
from tokenloom.services.runtime.host.options import flag, options_of

FOLDER = Path(__file__).parents[2] / "examples" / "two_machines"
FLAGS = {
    service.service: {flag(name) for option in options_of(service).values() for name in option.names}
    for service in SERVICES
}


def parts(script: str) -> list[tuple[str, list[str]]]:
    """Return the service and the flags of each part that a script starts."""
    text = (FOLDER / script).read_text().replace("\\\n", " ")
    return [(words[1], [word for word in words if word.startswith("--")]) for words in map(str.split, text.splitlines())
            if words[:1] == ["part"]]  # fmt: skip


@pytest.mark.parametrize("script", ["first.sh", "second.sh"])
def test_options_exist(script: str) -> None:
    assert parts(script)
    for service, flags in parts(script):
        assert set(flags) <= FLAGS[service], service
    shared = set(re.findall(r"--[a-z-]+(?= \")", (FOLDER / "part.sh").read_text()))
    assert shared == {"--tls-ca", "--tls-cert", "--tls-key"}


def test_both_scripts_together_start_every_kind_of_part() -> None:
    started = [service for script in ("first.sh", "second.sh") for service, _ in parts(script)]
    assert set(started) == set(FLAGS) - {"encoder", "relay"}  # the demo model reads no images, and no relay is needed
    assert started.count("engine") == 2


@pytest.mark.parametrize("script", ["first.sh", "second.sh", "part.sh"])
def test_the_shell_reads_the_scripts(script: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / script], check=True)
