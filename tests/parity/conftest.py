"""One reference per model for the whole run: it is the slowest part."""

import pytest
import torch

from tests.parity.reference import MODELS, Reference, make_reference


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp("checkpoints"))
