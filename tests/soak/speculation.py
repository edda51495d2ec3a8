"""``python -m tests.soak.speculation``: random requests with drafts and without, compared by ``tests.parity``."""

import argparse
import time

from tests.parity.speculation import METHODS, abandon, answer, compare, make_llm, random_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first requests; the others follow")
    parser.add_argument("--at-once", type=int, default=40, help="requests at a time, more than there is room for")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--async-scheduling", action="store_true", help="overlap the steps of the engines that draft")
    arguments = parser.parse_args()
    reference, overlaps = make_llm(), arguments.async_scheduling
    engines = {method: make_llm(METHODS[method], async_scheduling=overlaps) for method in arguments.methods}
    started, num_tokens = time.monotonic(), 0
    for first in range(0, arguments.requests, arguments.at_once):
        requests = random_requests(arguments.seed + first, min(arguments.at_once, arguments.requests - first))
        expected = answer(reference, requests)
        for method, llm in engines.items():
            abandon(llm, random_requests(arguments.seed + first + 1, 5), 10)
            count = compare(reference, requests, expected, answer(llm, requests))
            assert count, f"{method} drew no token"
        num_tokens += count
        print(f"{first + len(requests)} requests, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{arguments.requests} requests, {num_tokens} tokens: the same with drafts and without")
    for method, llm in engines.items():
        scheduler = llm._client._core.scheduler
        stats, num_preempted = scheduler.drafts.stats(), scheduler.stats().num_preemptions
        right = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts were right"
        print(f"{method}: {right}; {num_preempted} requests were preempted")


if __name__ == "__main__":
    main()
