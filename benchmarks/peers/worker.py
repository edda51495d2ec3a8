"""Serves one adapter over standard input and output, a line of JSON each way, in the peer's environment.

Lines in: ``{"workload": name, "seed": n}``. Lines out: one when the model is loaded, then one for each line in.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from .workloads import WORKLOADS


def main(argv: list[str]) -> None:
    """``argv`` is module.Class of the adapter, and a JSON object with model, threads, workloads, options."""
    # Libraries may print to standard output, so the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, name = argv[0].rpartition(".")
    setup: dict[str, Any] = json.loads(argv[1])
    workloads = [WORKLOADS[each] for each in setup["workloads"]]
    adapter_class = getattr(importlib.import_module(f".adapters.{module}", __package__), name)
    adapter = adapter_class(setup["model"], setup["threads"], workloads, setup["options"])
    print(json.dumps({"version": adapter.version, "pid": os.getpid()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        workload = WORKLOADS[command["workload"]]
        timing = adapter.run(workload, workload.prompts(setup["vocab_size"], command["seed"]))
        if timing.output_tokens != workload.requests * workload.output:
            raise SystemExit(
                f"{argv[0]}: {timing.output_tokens} tokens came, not {workload.requests * workload.output}"
            )
        print(json.dumps(asdict(timing)), file=answers)
    adapter.close()
