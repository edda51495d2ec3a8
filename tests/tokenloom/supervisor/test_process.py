"""What a part finds in its environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.process import Process

Printed = list[tuple[str, str]]
TELL = "import os; print(os.environ['GRPC_EXPERIMENTS'])"


async def told(output: LineCopier, printed: Printed, state_dir: Path) -> str:
    spec = PartSpec("gateway", 0, (sys.executable, "-c", TELL), state_dir / "state")
    assert await (await Process.start(spec, output)).wait() == 0
    output.close()
    return printed[-1][1]


async def test_grpc_has_no_event_engine_unless_the_user_says_otherwise(
    output: LineCopier, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    assert "-event_engine_client" in await told(output, printed, tmp_path)
    monkeypatch.setenv("GRPC_EXPERIMENTS", "mine")
    assert await told(output, printed, tmp_path) == "mine"


async def test_a_part_does_not_inherit_the_secrets_of_others(
    output: LineCopier, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_API_KEY", "the supervisor's")
    tell = "import os; print(os.environ.get('TOKENLOOM_API_KEY'))"
    withheld = frozenset({"TOKENLOOM_API_KEY"})
    for environment in ({}, {"TOKENLOOM_API_KEY": "its own"}):
        spec = PartSpec(
            "part", 0, (sys.executable, "-c", tell), tmp_path / "state", environment=environment, withheld=withheld
        )
        assert await (await Process.start(spec, output)).wait() == 0
    output.close()
    assert [line for _, line in printed] == ["None", "its own"]


async def test_a_part_inherits_no_option_that_is_decided_for_each_part(
    output: LineCopier, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address, name or certificate for all parts would be wrong."""
    tell = "import os; print(*sorted(name for name in os.environ if name.startswith('TOKENLOOM_')))"
    for name in ("METRICS_LISTEN", "CONFIG", "TLS_CA", "HEALTH_LISTEN", "INSTANCE_ID", "KV_LISTEN", "MAX_NUM_SEQS"):
        monkeypatch.setenv(f"TOKENLOOM_{name}", "x")
    spec = PartSpec("part", 0, (sys.executable, "-c", tell), tmp_path / "state")
    assert await (await Process.start(spec, output)).wait() == 0
    output.close()
    assert [line for _, line in printed] == ["TOKENLOOM_MAX_NUM_SEQS"]


async def test_only_parts_that_multiply_no_matrices_have_one_thread_for_it(
    output: LineCopier, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    tell = (sys.executable, "-c", "import os; print(os.environ.get('OPENBLAS_NUM_THREADS'))")
    for service in ("coordinator", "engine"):
        assert await (await Process.start(PartSpec(service, 0, tell, tmp_path / "state"), output)).wait() == 0
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert await (await Process.start(PartSpec("coordinator", 0, tell, tmp_path / "state"), output)).wait() == 0
    output.close()
    assert [line for _, line in printed] == ["1", "None", "3"]


def test_what_parts_share_is_imported_without_a_thread() -> None:
    """A process with threads is not forked."""
    code = (
        "import os, sys\n"
        "from tokenloom.supervisor.process import import_shared\n"
        "before = dict(os.environ)\n"
        "import_shared()\n"
        "print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules, before == dict(os.environ))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 True True\n"
