"""The demo model, loaded once."""

import pytest
import torch

from tests.gpu_worker.speculation.steps import DEMO_MODEL
from tokenloom.gpu_worker.models.load_model import load_model


@pytest.fixture(scope="package")
def model():
    torch.set_num_threads(1)
    return load_model(DEMO_MODEL, "float32")
