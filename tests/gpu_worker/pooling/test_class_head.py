"""The head of a classifier, as its configuration describes it."""

import json
from pathlib import Path

import pytest

from tokenloom.gpu_worker.checkpoint.load_config import num_classes
from tokenloom.gpu_worker.pooling.class_head import class_labels


@pytest.mark.parametrize(
    ("config", "labels", "count"),
    [
        ({"id2label": {"1": "high", "0": "low", "10": "odd"}}, ("low", "high", "odd"), 3),
        ({"num_labels": 4}, (), 4),
        ({}, (), 2),
    ],
)
def test_names_of_the_classes(tmp_path: Path, config: dict[str, object], labels: tuple[str, ...], count: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert class_labels(tmp_path) == labels
    assert num_classes(tmp_path) == count
