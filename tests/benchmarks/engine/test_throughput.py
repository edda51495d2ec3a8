"""`bench throughput` on the demo model."""

from tokenloom.bench.engine.throughput import ThroughputOptions, run_throughput, table
from tokenloom.bench.load.datasets import DatasetOptions
from tokenloom.model_files.model_path import DEMO_MODEL_NAME


def test_counts_are_those_of_the_prompts() -> None:
    dataset = DatasetOptions(num_prompts=3, input_len=5, output_len=4)
    report = run_throughput(ThroughputOptions(DEMO_MODEL_NAME, dataset, {"max_num_seqs": 4}, progress=False))
    assert (report["total_input_tokens"], report["total_output_tokens"], report["num_requests"]) == (15, 12, 3)
    assert report["requests_per_second"] > 0
    assert table(report).row_count == 4
