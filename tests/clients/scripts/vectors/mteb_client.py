"""mteb: the harness scores one small task, made of questions and answers in this folder, with vectors of the mesh."""

import os
from typing import Any

import mteb
import numpy as np
import openai
from answers import QUESTIONS, TEXTS
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder

PAIRS = [
    (question, TEXTS[(index + shift) % len(TEXTS)], 5.0 if shift == 0 else 0.0)
    for index, question in enumerate(QUESTIONS)
    for shift in (0, 1)
]
"""Each question with its answer, and with the answer to another one."""


class LocalSTS(AbsTaskSTS):  # type: ignore[misc]
    """Pairs with how alike they are, 0 or 5."""

    metadata = TaskMetadata(
        name="LocalSTS",
        description="Questions and answers.",
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
        url = os.environ["TOKENLOOM_URL"] + "/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.mteb_model_meta = ModelMeta.create_empty({"name": "tokenloom/mesh"})

    def encode(self, inputs: Any, **_: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        answer = self.client.embeddings.create(model=os.environ["TOKENLOOM_MODEL"], input=texts)
        return np.array([item.embedding for item in answer.data], dtype=np.float32)


results = mteb.evaluate(MeshEncoder(), LocalSTS(), cache=None)
score = results.task_results[0].get_score()
assert score > 0.7, score
print(f"cosine_spearman {score:.3f}")
