"""A step on a CPU does not import Triton, which takes half a second and is not installed with the CPU's torch."""

import subprocess
import sys

_PROGRAM = """
import sys
from tokenloom import LLM, SamplingParams

outputs = LLM(model="tokenloom-demo", device="cpu").generate(["Once"], SamplingParams(max_tokens=2))
assert len(outputs[0].outputs[0].token_ids) == 2
print(sorted(name for name in sys.modules if name.split(".")[0] == "triton" or ".kernels.triton" in name))
"""


def test_a_step_on_a_cpu_imports_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
