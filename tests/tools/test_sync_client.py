import pytest

from tools.sync_client import CLIENT, MODULES, blocking


@pytest.mark.parametrize("module", MODULES)
def test_the_blocking_client_is_that_for_asyncio(module: str) -> None:
    assert (CLIENT / f"sync_{module}.py").read_text() == blocking(module)


def test_no_word_of_asyncio_is_left() -> None:
    texts = [blocking(module).split("\n", 1)[1] for module in MODULES]
    assert not [word for text in texts for word in ("async", "await", "asyncio", "aio.", "event loop") if word in text]
