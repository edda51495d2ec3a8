from pathlib import Path

import pytest

from tests.checkpoints.vision_prompts import VisionModel, picture
from tests.checkpoints.whole_vision import FAMILIES, write_whole_vision
from tests.parity.vision_checkpoints import load_vision


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_change_with_the_image(kind: str, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    model = VisionModel(kind, path, load_vision(path))
    texts = [model.generate(model.prompt([picture(200, 120, seed)]), 24).tokens for seed in range(3)]
    assert len({tuple(each) for each in texts}) == 3, texts
    assert len(set(texts[0])) > 4, texts[0]
