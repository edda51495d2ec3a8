"""Record what sentence-transformers computes of the layouts: ``python -m tests.parity.embeddings.record``.

It runs where sentence-transformers is installed beside the transformers and torch of the tests, which need it not.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.embeddings.layouts import LAYOUTS, TEXTS, Layout

VECTORS = Path(__file__).parent / "vectors.json"


def digest(path: Path) -> str:
    """Return what identifies the weights and tokenizers in a directory."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.suffix in (".safetensors", ".bin") or file.name == "tokenizer.json":
            found.update(file.name.encode() + (file.read_bytes() if file.suffix != ".bin" else b""))
    return found.hexdigest()[:16]


def record(layout: Layout, path: Path) -> dict[str, Any]:
    """Return the vectors of the texts, by the name of the prompt; of no name: with what the files say."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    layout.save(path)
    model = SentenceTransformer(str(path), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32})
    vectors = {}
    for name in ("", *layout.prompts):
        rows = [model.encode(text, prompt_name=name or None, normalize_embeddings=True) for text in TEXTS]
        vectors[name] = [[round(float(number), 7) for number in row] for row in rows]
    return {"files": digest(path), "vectors": vectors}


def main() -> None:
    import sentence_transformers  # pyright: ignore[reportMissingImports]  # of an environment of its own

    found: dict[str, Any] = {
        "sentence-transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as directory:
            found[name] = record(layout, Path(directory))
    VECTORS.write_text(json.dumps(found, separators=(",", ":")).replace('"files"', '\n"files"') + "\n")


if __name__ == "__main__":
    main()
