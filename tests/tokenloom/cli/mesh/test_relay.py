"""`relay` refuses what cannot be meant, and ends by a signal."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        ([], 2, "--grpc-listen needs --grpc-gateways"),
        (["--grpc-listen", "127.0.0.1:0"], 2, "--grpc-listen needs --grpc-gateways"),
        (["--https-listen", "127.0.0.1:0", "--http-gateways", "a:1"], 2, "--https-listen needs --public-tls-cert"),
        (["--https-listen", "unix:/a", "--http-gateways", "a:1"], 2, "unix sockets are not held"),
        (["--grpc-listen", "nowhere", "--grpc-gateways", "a:1"], 2, "expected host:port or unix:/path"),
        (["--grpc-listen", "127.0.0.1:0", "--grpc-gateways", "nowhere"], 2, "not 'nowhere'"),
        (["--grpc-listen", "127.0.0.1:0", "--grpc-gateways", ","], 2, "--grpc-listen needs --grpc-gateways"),
        (["--drain-timeout", "soon"], 2, "'--drain-timeout': must be a number"),
        (["--max-client-connections", "0"], 2, "'--max-client-connections': must be an integer ≥ 1"),
    ],
)
def test_what_cannot_be_relayed_is_refused(words: list[str], status: int, reason: str) -> None:
    result = CliRunner().invoke(app, ["relay", *words])
    assert result.exit_code == status
    assert reason in " ".join(result.output.split())


def test_it_does_not_listen_for_other_machines_in_plain_text() -> None:
    words = ["-m", "tokenloom.cli.main", "relay", "--grpc-listen", "0.0.0.0:0", "--grpc-gateways", "a:1"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "could reach 0.0.0.0:0 without encryption" in ended.stderr


def test_it_says_that_it_relays_and_ends_by_a_signal(socket_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-m", "tokenloom.cli.main", "relay", "--grpc-listen", f"unix:{socket_dir}/relay"]
    command += ["--grpc-gateways", "127.0.0.1:1, 127.0.0.1:2", "--drain-timeout", "3"]
    words = ["prlimit", f"--nofile={min(soft, 256)}:{hard}", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            assert relay.stdout.readline() == "relaying to gateways; Ctrl-C ends it\n"
            assert psutil.Process(relay.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
            relay.send_signal(signal.SIGTERM)
            assert relay.wait(30) == 0
        finally:
            relay.kill()
