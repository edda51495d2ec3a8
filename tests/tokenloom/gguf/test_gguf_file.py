"""The head of a GGUF file: values, places of tensors, and files that are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tokenloom.gguf.gguf_file import is_later_part, read_gguf, whole_stem


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.long", -(1 << 40))
    writer.add_float32("a.fraction", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.texts", ["x", "yz", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_values_and_tensors(path: Path) -> None:
    file = read_gguf(path)
    found = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert found == {
        "a.number": 7, "a.long": -(1 << 40), "a.fraction": 0.5, "a.flag": True, "a.text": "naïve",
        "a.texts": ["x", "yz", ""], "a.numbers": [1, 2, 3],
    }  # fmt: skip
    content = path.read_bytes()
    first, second = file.tensors["first"], file.tensors["second"]
    assert (first.shape, second.shape) == ((2, 3), (4,))
    assert np.frombuffer(content, np.float32, 6, first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(content, np.float16, 4, second.offset).tolist() == [0, 1, 2, 3]
    begin, end = file.spans["a.text"]
    assert "naïve".encode() in content[begin:end]


def test_a_file_that_is_cut_off_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    head = max(end for _, end in read_gguf(path).spans.values())
    for length in range(4, head, 7):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a valid GGUF file"):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 of GGUF is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "must be 2 or 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "is not a valid GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(60), "it ends before a value of"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"k", 77, 0), "a value of the unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 61), "it ends before a value of"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 1, 0, 1, b"t", 9, 1), "t has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 0, 1, b"t", 0, 0, 0), "t has 0 dimensions"),
    ],
)
def test_what_is_no_such_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "bad.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three files, as llama.cpp's tools split and name them; only the first has the metadata."""
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("a.number", 7)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full(3, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("big-*"))


def test_several_files_of_a_model(parts: list[Path]) -> None:
    assert [part.name for part in parts] == [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for named in parts:
        file = read_gguf(named)
        assert (file.path, file.parts, file.metadata["a.number"]) == (parts[0], tuple(parts), 7)
        assert [tensor.path for tensor in file.tensors.values()] == [parts[n // 2] for n in range(5)]
        for number, tensor in enumerate(file.tensors.values()):
            assert np.frombuffer(tensor.path.read_bytes(), np.float32, 3, tensor.offset).tolist() == [number] * 3
    assert [is_later_part(part) for part in parts] == [False, True, True]
    assert {whole_stem(part) for part in parts} == {"big"}


def test_a_missing_or_wrong_file_of_several_is_named(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"00001-of-00003\.gguf is one of 3 files .*00002-of-00003\.gguf is missing"):
        read_gguf(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf says that it is number 2 of 3 .* is number 1 of 3"):
        read_gguf(parts[0])
    parts[1].write_bytes(content[:40])
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf is not a valid GGUF file"):
        read_gguf(parts[0])
    parts[1].write_bytes(content)
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ValueError, match=r"model\.gguf is one of 3 files of a model and was renamed: name each as"):
        read_gguf(renamed)


def test_tensors_that_are_in_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lost-00001-of-00001.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 1)
    writer.add_int32("split.tensors.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"its 1 files have 0 tensors, split\.tensors\.count is 3"):
        read_gguf(path)
