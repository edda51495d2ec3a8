"""``python -m tests.gpu_check``: what a GPU computes, and how fast; one line where there is none."""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu_check.parity import check_greedy, check_sampler
from tests.gpu_check.throughput import measure
from tests.parity.reference import MODELS
from tokenloom.bench.random_model import write_model

_BATCHES = (1, 8, 32, 128)
_PROMPT_LEN, _OUTPUT_LEN = 512, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the check itself")
    parser.add_argument("--models", nargs="*", default=MODELS, help="of the parity check")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of the model that is timed")
    parser.add_argument("--batch", type=int, nargs="*", default=_BATCHES)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: skipped: PyTorch {torch.__version__} finds no GPU")
        return 0
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"gpu-check on {name}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        _check_parity(Path(directory), arguments.models, arguments.device)
        _show_throughput(Path(directory), arguments.shape, arguments.batch, arguments.device)
    print("gpu-check: passed")
    return 0


def _check_parity(directory: Path, models: list[str], device: str) -> None:
    different = check_sampler(torch.device(device))
    print(f"sampler: the host's tokens, but for {different} of 256")
    for model in models:
        num_prompts = check_greedy(model, directory, device)
        print(f"parity: {model}: {num_prompts} prompts as transformers has them: at once, in chunks, preempted")


def _show_throughput(directory: Path, shape: str, batches: list[int], device: str) -> None:
    model = directory / shape
    write_model(shape, model)
    print(f"{shape}, {_PROMPT_LEN} prompt and {_OUTPUT_LEN} output tokens")
    print(f"{'batch':>6} {'prefill tok/s':>14} {'step ms':>9} {'decode tok/s':>13}")
    for row in measure(model, device, batches, prompt_len=_PROMPT_LEN, output_len=_OUTPUT_LEN):
        print(f"{row.batch:>6} {row.prefill_rate:>14,.0f} {row.step_ms:>9.2f} {row.decode_rate:>13,.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
