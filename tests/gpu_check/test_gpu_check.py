"""The check itself, with tensors of the CPU: it will first meet a GPU elsewhere."""

import sys

import pytest
import torch

from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check.parity import check_sampler


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0
    line = capsys.readouterr().out
    assert line.startswith("gpu-check: skipped: ")
    assert line.count("\n") == 1


def test_it_checks_and_measures(monkeypatch, capsys):
    flags = ["--device", "cpu", "--models", "llama", "--shape", "tiny-fp32", "--batch", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *flags])
    monkeypatch.setattr(gpu_check, "_PROMPT_LEN", 8)
    monkeypatch.setattr(gpu_check, "_OUTPUT_LEN", 4)
    monkeypatch.setattr(gpu_check, "check_sampler", lambda device: check_sampler(device, rows=20, vocab=2000))
    assert gpu_check.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "gpu-check: passed"
    assert [int(line.split()[0]) for line in out[-3:-1]] == [1, 2]


def test_a_sampler_that_differs_fails(monkeypatch):
    monkeypatch.setattr("tests.gpu_check.parity.DeviceSampler.sample", lambda self, logits, *_: [0] * len(logits))
    with pytest.raises(AssertionError, match="differ from the host's"):
        check_sampler(torch.device("cpu"), rows=20, vocab=500)
