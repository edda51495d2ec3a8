from pathlib import Path

from tests.soak.replay import TURNS, replay


async def test_each_answer_is_accepted_as_history_by_every_api(socket_dir: Path) -> None:
    seen = await replay(socket_dir, range(40))
    kinds = ("chat", "messages", "responses", "ollama", "grpc")
    assert sum(seen[kind] for kind in kinds) == 40 * TURNS, seen
    assert min(seen[kind] for kind in kinds) > 10, seen
    assert min(seen[kind] for kind in ("cut", "with calls", "with reasoning")) > 30, seen
