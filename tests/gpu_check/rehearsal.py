"""``make gpu-rehearsal``: the kernels and the check itself with the versions that a machine with a GPU has, on a CPU.

It makes an environment of its own: the build of PyTorch for CUDA, with which the version of Triton comes that it asks
for. Triton's interpreter computes; its tests forbid bfloat16, which it computes wrongly. The first run downloads some
gigabytes, into ``REHEARSAL_VENV`` or a folder below ``/tmp``.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch==2.11.*", "triton==3.6.*", "numpy<2.4", f"{ROOT}[engine,dev]")
"""NumPy as the interpreter of Triton 3.6 takes it: it turns arrays of one element into indices."""
TESTS = ("tests/gpu_worker/kernels/triton", "tests/gpu_worker/cuda", "tests/gpu_check")


def main() -> int:
    folder = Path(os.environ.get("REHEARSAL_VENV", "/tmp/tokenloom-gpu-rehearsal"))
    python, done = folder / "bin/python", folder / "installed"
    wanted = "\n".join(PACKAGES)
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--editable", PACKAGES[-1], *PACKAGES[:-1]], check=True
        )
        done.write_text(wanted)
    print(versions(python), flush=True)
    return subprocess.run([python, "-m", "pytest", "-q", *TESTS, *sys.argv[1:]], cwd=ROOT, check=False).returncode


def versions(python: Path) -> str:
    """Return one line with what the rehearsal runs with."""
    program = (
        "import numpy, sys, torch, triton\n"
        "print(f'Python {sys.version.split()[0]}, PyTorch {torch.__version__} for CUDA {torch.version.cuda}, '\n"
        "      f'Triton {triton.__version__}, NumPy {numpy.__version__}')"
    )
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
