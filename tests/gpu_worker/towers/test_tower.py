"""A tower alone computes the rows that the whole model of transformers computes."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.checkpoints.vision_prompts import VisionModel, picture
from tests.checkpoints.whole_vision import FAMILIES, write_whole_vision
from tokenloom.gpu_worker.towers.image_file import BadImage
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.tower import Tower


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    processor, tower = Processor(path), Tower(path)
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained  # with the attention that the tower has too
    whole = VisionModel(kind, path, load(path, dtype=torch.float32).eval())
    for image in (picture(200, 120), picture(90, 210, 2)):
        rows = tower.rows(processor.pixels(png(image)))
        expected = whole.prompt([image]).pictures[0].rows
        assert rows.shape == (len(expected), tower.width)
        assert np.array_equal(rows, expected)
    first, other = (tower.rows(processor.pixels(png(picture(200, 120, seed)))) for seed in (0, 1))
    assert np.abs(first - other).max() > 1e-3


def test_the_decoder_is_not_kept(tmp_path: Path) -> None:
    path = write_whole_vision("llava", tmp_path)
    names = [name for name, _ in Tower(path)._body.named_parameters()]
    assert names
    assert not [name for name in names if "language_model" in name]


def test_a_checkpoint_without_its_tower_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_whole_vision("llava", tmp_path)
    file = path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "vision" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights of its tower"):
        Tower(path)


def test_options_that_requests_may_not_set_are_refused(tmp_path: Path) -> None:
    processor = Processor(write_whole_vision("llava", tmp_path))
    with pytest.raises(BadImage, match="do_resize"):
        processor.pixels(png(picture(20, 20)), {"do_resize": False})


def test_files_are_prepared_without_torch(tmp_path: Path) -> None:
    path = write_whole_vision("llava", tmp_path)
    (tmp_path / "image.png").write_bytes(png(picture(200, 120)))
    script = (
        "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None\n"
        "from pathlib import Path\n"
        "from tokenloom.gpu_worker.towers.processor import Processor\n"
        f"values = Processor(Path({str(path)!r})).pixels(Path({str(tmp_path / 'image.png')!r}).read_bytes())\n"
        "print({name: value.shape for name, value in values.items()})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    shapes: Any = {name: value.shape for name, value in Processor(path).pixels(png(picture(200, 120))).items()}
    assert done.stdout.strip() == str(shapes)
