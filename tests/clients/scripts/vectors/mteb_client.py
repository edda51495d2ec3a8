"""mteb: the harness scores one small task, made of sentences in this file, with vectors of the mesh."""

import os
from typing import Any

import mteb
import numpy as np
import openai
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder

PAIRS = [
    ("a cat sat on a mat", "the cat sat on the mat", 5.0),
    ("two dogs ran in the park", "two dogs run in a park", 4.5),
    ("she reads a long book", "he reads a long letter", 3.0),
    ("rain fell on the roof", "the sun shone on the sea", 1.5),
    ("a cat sat on a mat", "buy quick wool", 0.5),
    ("two dogs ran in the park", "my job is maths", 0.0),
]


class LocalSTS(AbsTaskSTS):  # type: ignore[misc]
    """Sentences with how alike they are, 0 to 5."""

    metadata = TaskMetadata(
        name="LocalSTS",
        description="Sentences of this file.",
        dataset={"path": "local", "revision": "1"},
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, **_: Any) -> None:
        first, second, score = zip(*PAIRS, strict=True)
        columns = {"sentence1": list(first), "sentence2": list(second), "score": list(score)}
        self.dataset = DatasetDict(test=Dataset.from_dict(columns))
        self.data_loaded = True


class MeshEncoder(AbsEncoder):  # type: ignore[misc]
    """Encodes with ``/v1/embeddings``."""

    def __init__(self) -> None:
        url = os.environ["SCRIPTED_URL"] + "/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.mteb_model_meta = ModelMeta.create_empty({"name": "tokenloom/mesh"})

    def encode(self, inputs: Any, **_: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        answer = self.client.embeddings.create(model=os.environ["SCRIPTED_MODEL"], input=texts)
        return np.array([item.embedding for item in answer.data], dtype=np.float32)


results = mteb.evaluate(MeshEncoder(), LocalSTS(), cache=None)
score = results.task_results[0].get_score()
assert score > 0.7, score
print(f"cosine_spearman {score:.3f}")
