from tools.sync_client import CLIENT, blocking


def test_the_blocking_client_is_that_for_asyncio() -> None:
    assert (CLIENT / "sync_client.py").read_text() == blocking()


def test_no_word_of_asyncio_is_left() -> None:
    text = blocking().split("\n", 1)[1]
    assert not [word for word in ("async", "await", "asyncio", "aio.", "event loop") if word in text]
