"""``python -m tests.soak.network``: prefill and decode engines on both sides of a bad network.

Two network namespaces, joined by a pair of virtual devices, stand for two machines; ``examples/two_machines`` runs in
them. Packets are lost at random (``nft numgen``), in one direction only, when they are large (a router that drops what
does not fit and says nothing), or all of them. Every answer must have the text that the same request had undisturbed.
Needs root, ``ip`` and ``nft``.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
STARTS_WITHIN, ANSWERS_WITHIN = 120.0, 90.0
FAULTS = {
    "no fault": "",
    "2 % of all packets are lost": "meta iifname wire numgen random mod 100 < 2 drop",
    "10 % of all packets are lost": "meta iifname wire numgen random mod 100 < 10 drop",
    "nothing arrives from the other machine for 3 s": "meta iifname wire drop",
    "packets of more than 600 bytes are lost for 5 s": "meta iifname wire meta length > 600 drop",
}
"""Rules for what arrives at the first machine."""
LASTS = {"nothing arrives from the other machine for 3 s": 3.0, "packets of more than 600 bytes are lost for 5 s": 5.0}
_ASK = """
import json, sys, urllib.request
body = json.loads(sys.stdin.read())
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
with urllib.request.urlopen(request, timeout=float(sys.argv[1])) as response:
    sys.stdout.write(response.read().decode())
"""


class Machines:
    """Two namespaces and the parts in them."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._names = [f"{name}-1", f"{name}-2"]

    @contextlib.contextmanager
    def running(self) -> Iterator["Machines"]:
        """Make the namespaces, run a mesh in them, and remove both."""
        certificates = self._directory / "certs"
        _run(sys.executable, "-m", "tokenloom.cli.main", "certs", str(certificates), "--by-part")
        with contextlib.ExitStack() as stack:
            for number, name in enumerate(self._names, 1):
                _run("ip", "netns", "add", name)
                stack.callback(_run, "ip", "netns", "delete", name)
                if number == 2:
                    first, second = self._names
                    _run(*f"ip -n {first} link add wire type veth peer name wire netns {second}".split())
            for name, address in zip(self._names, (FIRST, SECOND), strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    _run("ip", "-n", name, "link", "set", device, "up")
            scripts = (("first.sh", FIRST), ("second.sh", SECOND, FIRST))
            for name, arguments in zip(self._names, scripts, strict=True):
                stack.enter_context(self._process(name, *arguments, str(certificates)))
            yield self

    @contextlib.contextmanager
    def _process(self, name: str, script: str, *arguments: str) -> Iterator[None]:
        command = ["ip", "netns", "exec", name, str(ROOT / "examples" / "two_machines" / script), *arguments]
        # In bfloat16 a request that goes on elsewhere may take another token where two are nearly equally likely.
        environment = {**os.environ, "PYTHON": sys.executable, "TOKENLOOM_DTYPE": "float32"}
        with open(self._directory / f"{script}.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)

    def disturb(self, rule: str) -> None:
        """Drop what a rule says of the packets that arrive at the first machine; empty: none."""
        text = "flush ruleset\n"
        if rule:
            text += f"table inet t {{\n chain c {{\n type filter hook input priority 0;\n {rule}\n }}\n}}\n"
        subprocess.run(["ip", "netns", "exec", self._names[0], "nft", "-f", "-"], input=text, text=True, check=True)

    def ask(self, body: dict[str, Any], seconds: float = ANSWERS_WITHIN) -> dict[str, Any]:
        """Return the answer of the gateway. Raises ``CalledProcessError``."""
        command = ["ip", "netns", "exec", self._names[0], sys.executable, "-c", _ASK, str(seconds)]
        done = subprocess.run(command, input=json.dumps(body), text=True, capture_output=True, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def logs(self) -> str:
        """Return the ends of the parts' logs."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self._directory.glob("*.log"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _body(number: int, salt: str) -> dict[str, Any]:
    """Return a request. ``salt``: with another one, no engine has its blocks cached, so that they move once more."""
    prompt = [2 + (number * 31 + place * 7) % 1500 for place in range(300)]
    return {
        "model": "tokenloom-demo",
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "return_token_ids": True,
        "return_timeline": True,
    }


def _await_mesh(machines: Machines) -> None:
    """Return when an answer has used both machines."""
    end, number = time.monotonic() + STARTS_WITHIN, 1_000_000
    while True:
        number += 1  # a prompt that no engine has cached
        with contextlib.suppress(subprocess.CalledProcessError):
            timeline = machines.ask(_body(number, "start"), 5.0)["timeline"]
            if timeline["prefill_engine"] != timeline["decode_engine"]:
                return
        if time.monotonic() > end:
            raise AssertionError(f"the mesh does not serve\n{machines.logs()}")
        time.sleep(0.5)


def _try(machines: Machines, kind: str, first: int, requests: int, expected: dict[int, list[int]]) -> bool:
    """Send requests under a fault. Returns whether each has its tokens."""
    wrong, longest, moved = [], 0.0, 0
    lasts = LASTS.get(kind)
    for number in range(first, first + requests):
        machines.disturb(FAULTS[kind])
        healing = None
        if lasts is not None:  # a link that is whole again after a while
            script = f"sleep {lasts}; echo flush ruleset | ip netns exec {machines._names[0]} nft -f -"
            healing = subprocess.Popen(["sh", "-c", script])
        began = time.monotonic()
        try:
            answer = machines.ask(_body(number, kind))
            found = answer["choices"][0]["token_ids"]
            moved += answer["timeline"]["prefill_engine"] != answer["timeline"]["decode_engine"]
            if found != expected.setdefault(number, found):
                wrong.append(f"{number}: {found} instead of {expected[number]}")
        except subprocess.CalledProcessError as error:
            wrong.append(f"{number}: {error.stderr.strip().splitlines()[-1:]}")
        longest = max(longest, time.monotonic() - began)
        if healing is not None:
            healing.wait()
    machines.disturb("")
    print(
        f"{kind}: {requests} requests, {moved} over both machines, longest {longest:.1f} s, {len(wrong)} wrong",
        flush=True,
    )
    for each in wrong:
        print(f"  ! {each}")
    return not wrong


def run(requests: int) -> bool:
    """Try every fault. Returns whether all answers have their tokens."""
    with (
        tempfile.TemporaryDirectory(prefix="network-", dir="/tmp") as name,
        Machines(Path(name), f"tl{os.getpid()}").running() as machines,
    ):
        _await_mesh(machines)
        expected: dict[int, list[int]] = {}
        results = [_try(machines, kind, 0, requests, expected) for kind in FAULTS]
        return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10, help="under each fault (10)")
    arguments = parser.parse_args()
    if missing := [tool for tool in ("ip", "nft") if shutil.which(tool) is None]:
        print(f"needs {' and '.join(missing)} (Debian: iproute2, nftables)")
        return 2
    return 0 if run(arguments.requests) else 1


if __name__ == "__main__":
    sys.exit(main())
