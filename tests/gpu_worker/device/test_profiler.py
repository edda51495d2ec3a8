import gzip
import json
from pathlib import Path

import pytest
import torch

from tokenloom.gpu_worker.device.profiler import Profiler


def test_what_is_computed_meanwhile_is_written_to_the_directory(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "profiles"))
    profiler.start()
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profiler.stop()
    (trace,) = (tmp_path / "profiles").iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_start_and_stop_take_turns(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path))
    with pytest.raises(ValueError, match="no profile is being recorded"):
        profiler.stop()
    profiler.start()
    with pytest.raises(ValueError, match="recorded already"):
        profiler.start()
    profiler.close()
    profiler.close()
    assert len(list(tmp_path.iterdir())) == 1, "closing keeps what was recorded"


def test_without_a_directory_it_is_refused() -> None:
    with pytest.raises(ValueError, match="without profiler_dir"):
        Profiler("").start()
