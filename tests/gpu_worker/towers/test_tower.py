"""A tower alone computes the rows that the whole model of transformers computes."""

import io
import json
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
from tests.gpu_worker.cuda.op_capture import OpCapture
from tokenloom.gpu_worker.towers.image_file import BadImage
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.tower import Tower, TowerGraphs, round_layers


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


@pytest.mark.parametrize("kind", FAMILIES)
def test_images_of_one_size_are_computed_together(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole_vision(kind, tmp_path)
    processor, tower = Processor(path), Tower(path)
    # Of the last one some families make as many pixels as of the others, and fewer rows.
    shown = [picture(200, 120), picture(90, 210, 2), picture(200, 120, 3), picture(200, 120, 4), picture(190, 120, 5)]
    pixels = [processor.pixels(png(image)) for image in shown]
    alone = [tower.rows(each) for each in pixels]
    calls, compute = [], tower._body.get_image_features
    monkeypatch.setattr(tower._body, "get_image_features", lambda **given: calls.append(given) or compute(**given))
    rows = tower.rows_of(pixels)
    assert (len(calls) == len(shown)) == (kind in ("pixtral", "mistral3"))
    for one, other in zip(rows, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert np.abs(rows[0] - rows[2]).max() > 1e-3


@pytest.mark.parametrize("kind", ["llava", "gemma3", "internvl", "idefics3", "qwen3_vl", "gemma4_e2b"])
def test_graphs_compute_what_comes_again(kind: str, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    processor, tower = Processor(path), Tower(path)
    shown = [processor.pixels(png(picture(200, 120, seed))) for seed in range(4)]
    other = processor.pixels(png(picture(90, 210)))
    expected = [tower.rows(each) for each in (*shown, other)]
    tower._graphs = graphs = TowerGraphs(OpCapture())
    for each, rows in zip((*shown, other), expected, strict=True):
        np.testing.assert_allclose(tower.rows(each), rows, rtol=1e-4, atol=1e-5)
    # The first one of a size is computed without; all sizes are one for models that scale images to one.
    assert graphs.num_replays == (4 if kind in ("llava", "gemma3") else 3)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3


def test_a_size_that_cannot_be_captured_is_computed_without_a_graph(tmp_path: Path) -> None:
    class Refusing:
        num_calls = 0

        def __call__(self, compute: Any) -> Any:
            self.num_calls += 1
            raise RuntimeError("operation not permitted when stream is capturing")

        def forget(self) -> None:
            """Do nothing."""

    path, capture = write_whole_vision("llava", tmp_path), Refusing()
    pixels, tower = Processor(path).pixels(png(picture(200, 120))), Tower(path)
    expected = tower.rows(pixels)
    tower._graphs = TowerGraphs(capture)
    for _ in range(4):
        assert np.array_equal(tower.rows(pixels), expected)
    assert capture.num_calls == 1


def test_a_size_without_room_for_its_graph_gets_one_later() -> None:
    class FullOnce(OpCapture):
        num_calls = 0

        def __call__(self, compute: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(compute)

    graphs, key = TowerGraphs(FullOnce()), (("pixels", (2,), b""),)
    for value in range(5):
        found = graphs.compute(key, {"pixels": torch.full((2,), float(value))}, lambda given: given["pixels"] * 2)
        assert found.tolist() == [2.0 * value] * 2
    assert graphs.num_replays == 2


def test_graphs_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave tower_graphs out on cpu"):
        Tower(tmp_path, has_graphs=True)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("quantization", "likeness"), [("int8-dynamic", 0.999), ("int4", 0.93)])
def test_rounded_towers_compute_nearly_the_rows(kind: str, quantization: str, likeness: float, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    pixels = Processor(path).pixels(png(picture(200, 120)))
    rows, rounded = Tower(path).rows(pixels), Tower(path, quantization=quantization).rows(pixels)
    assert not np.array_equal(rows, rounded)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(rounded, axis=1)
    assert np.median((rows * rounded).sum(1) / lengths) > likeness


def test_what_does_not_compute_rounded_layers_is_named() -> None:
    with pytest.raises(ValueError, match="leave tower_quantization out on cuda:1"):
        Tower(Path("not looked at"), device="cuda:1", quantization="int4")
    with pytest.raises(ValueError, match="int4 of a tower needs bfloat16 or float32"):
        round_layers(None, torch.float16, "int4")


def test_float16_becomes_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_whole_vision("llava", tmp_path)
    pixels, file = Processor(path).pixels(png(picture(200, 120))), path / "model.safetensors"
    expected = Tower(path).rows(pixels)
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config))
    tower = Tower(path)
    assert tower.is_bfloat16
    rows = tower.rows(pixels)
    assert np.linalg.norm(rows - expected) < 0.05 * np.linalg.norm(expected)
    assert not Tower(path, dtype="float16").is_bfloat16, "as it was asked for"


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_rotations_stay_float32(stored: str, tmp_path: Path) -> None:
    path = write_whole_vision("qwen2_5_vl", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"dtype": stored}
    (path / "config.json").write_text(json.dumps(config))
    tower = Tower(path)
    assert tower.is_bfloat16
    rotations = {name: each.dtype for name, each in tower._body.named_buffers() if "inv_freq" in name}
    assert rotations
    assert set(rotations.values()) == {torch.float32}


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
    with pytest.raises(BadImage, match="has no min_pixels and max_pixels"):
        processor.pixels(png(picture(20, 20)), {"min_pixels": 3})


@pytest.mark.parametrize("option", [{"min_pixels": "a"}, {"max_pixels": 2.5}, {"max_pixels": None}])
def test_options_of_another_type_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    """An error of another kind would end the process that prepares images."""
    processor = Processor(write_whole_vision("qwen2_vl", tmp_path))
    with pytest.raises(BadImage, match=f"{next(iter(option))} is of another type"):
        processor.pixels(png(picture(20, 20)), option)


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
