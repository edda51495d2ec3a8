"""Compiles ``chat.go`` against the package that ``make stubs`` writes, with Debian's Go and gRPC, and runs it."""

import os
import subprocess
from pathlib import Path

go = Path(os.environ["TOKENLOOM_STUBS"]) / "go" / "bin" / "go"
source = Path(__file__).with_name("chat.go")
subprocess.run([go, "vet", source], check=True)
subprocess.run([go, "build", "-o", "chat", source], check=True)
subprocess.run(["./chat"], check=True)
