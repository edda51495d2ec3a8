"""What the process of a core imports: each module costs time at every start."""

import subprocess
import sys


def test_a_core_starts_without_grpc() -> None:
    code = "import sys, tokenloom.services.engine.core.core_main, tokenloom.gpu_worker.devices; "
    code += "sys.exit(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    imported = set(result.stderr.split())
    assert "tokenloom.services.engine.core.core_main" in imported
    assert not {"google.protobuf", "grpc", "prometheus_client", "tokenizers", "torch._dynamo", "sympy"} & imported
