"""Several ranks compute Whisper's transcripts: each writes the keys and values of a sound for its heads and layers."""

from pathlib import Path

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.transcripts import TranscriptEngine, transcript_reference
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_tokens_are_those_of_one_rank(shape: tuple[int, int], tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    reference = transcript_reference()
    engine = TranscriptEngine(
        reference, prefix_caching=True, num_blocks=500, executor=executor, parallel=parallel(*shape)
    )
    for _ in range(2):
        assert engine.transcribe(reference.cases) == [case.tokens for case in reference.cases]
    engine.core.shutdown()
