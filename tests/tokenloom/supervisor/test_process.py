"""What a part finds in its environment."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.process.standby import NUMBER
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.process import Process, Standby, StandbyLost

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


PART = """
import sys
print("has numpy:", "numpy" in sys.modules, flush=True)
import slow_import
sys.exit(int(sys.argv[1]))
"""
SUPERVISOR = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from tokenloom.supervisor import process
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.process_tree import children, state

process._OF_ENGINES = ("slow_import",)
process.available_memory = {1}
output = LineCopier(lambda name, line: print(name, line, flush=True))

def spec(number, service="engine"):
    return PartSpec(service, number, (sys.executable, "-m", "a_part", str(number)), Path("state"))

async def ended(starter, number, service="engine"):
    started = await starter.start(spec(number, service))
    print(service, "ended", await started.wait(), flush=True)

first, starter = process.fork_first([spec(0), spec(1, "gateway")], output, has_standby=True)
print("first", *first, flush=True)

async def main():
    await first["gateway-1"].wait()
    standby = starter._standbys["engine"]
    {0}

asyncio.run(main())
starter.close()
starter.close()
print("children", len([pid for pid in children(os.getpid())]), flush=True)
output.close()
"""
FORKED = """
    await asyncio.gather(ended(starter, 0), ended(starter, 2), ended(starter, 3, "gateway"))
"""
KILLED = """
    await standby.ready()
    os.kill(standby._pid, signal.SIGKILL)
    await ended(starter, 0)
    await ended(starter, 2)
"""
STOPPED = """
    await standby.ready()
    process._LOOK_SECONDS = 0.05
    os.kill(standby._pid, signal.SIGSTOP)
    await ended(starter, 0)
"""
STOPPED_BEFORE_TWO = STOPPED.replace(
    "await ended(starter, 0)", "await asyncio.gather(ended(starter, 0), ended(starter, 2))"
)
ORPHANED = """
    parent = subprocess.Popen([sys.executable, "-c", "import os, time; print(os.fork(), flush=True); time.sleep(600)"],
                              stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    orphan = max(pids)
    answer = standby._answer
    async def answer_after_a_death(seconds):
        parent.kill()
        parent.wait()
        return await answer(seconds)
    await standby.ready()
    standby._answer = answer_after_a_death
    await ended(starter, 0)
    print("taken" if starter._orphans == {orphan} else starter._orphans, flush=True)
    standby._answer = answer
    os.kill(orphan, signal.SIGKILL)
    while state(orphan) is not None:
        time.sleep(0.01)
    await ended(starter, 2)
    print("left", starter._orphans, flush=True)
"""


def supervised(tmp_path: Path, steps: str, available_memory: str = "lambda: 8 << 30") -> tuple[list[str], int]:
    """Returns what a supervisor with a standby prints, and how often what the standby imports was imported."""
    program = SUPERVISOR.replace("{0}", steps.strip()).replace("{1}", available_memory)
    (tmp_path / "slow_import.py").write_text("import os; open(os.environ['IMPORTS'], 'a').write('x')\n")
    (tmp_path / "a_part.py").write_text(PART)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    return done.stdout.splitlines(), len((tmp_path / "imports").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")
def test_engines_are_forks_of_their_standby_and_other_parts_of_another(tmp_path: Path) -> None:
    lines, imports = supervised(tmp_path, FORKED)
    assert "first gateway-1" in lines, "the engine waits for the standby"
    assert [line for line in lines if " ended " in line].count("engine ended 0") == 1
    assert "engine ended 2" in lines
    assert "gateway ended 3" in lines
    assert imports == 3, "by the standby for two engines, and by each gateway"
    assert sum(line.endswith("has numpy: True") for line in lines) == 4, "what all parts share none imports"
    assert "children 0" in lines


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")
@pytest.mark.parametrize(
    ("steps", "reason"), [(KILLED, "it has ended"), (STOPPED, "it is stopped"), (STOPPED_BEFORE_TWO, "it is stopped")]
)
def test_engines_are_started_anew_when_the_standby_is_lost(steps: str, reason: str, tmp_path: Path) -> None:
    lines, imports = supervised(tmp_path, steps)
    assert f"standby-1 {reason}; processes of engine are started anew from now on" in lines
    assert sum(line.endswith("has numpy: False") for line in lines) == steps.count("ended(")
    assert "engine ended 0" in lines
    assert imports == 2 + steps.count("ended(")
    assert "children 0" in lines


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")
def test_where_memory_is_short_no_standby_imports_what_engines_need(tmp_path: Path) -> None:
    lines, imports = supervised(tmp_path, "await ended(starter, 0)", available_memory="lambda: 300 << 20")
    assert "standby-1 300 MiB of memory are free, of 1024 that it takes: there is none for engines" in lines
    assert lines.index("first engine-0 gateway-1") < lines.index("engine ended 0")
    assert imports == 3, "by each part"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")
def test_orphans_that_arrive_meanwhile_are_waited_for(tmp_path: Path) -> None:
    lines, _ = supervised(tmp_path, ORPHANED)
    assert "taken" in lines
    assert "left set()" in lines
    assert "children 0" in lines


async def test_an_answer_that_is_there_counts_however_late_it_is_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        standby = Standby("standby", os.getpid(), ours)
        asyncio.get_running_loop().call_later(0.02, theirs.send, NUMBER.pack(7))
        assert await standby._answer(0.01) == 7
        with pytest.raises(StandbyLost, match="not answered"):
            await standby._answer(-1.0)
