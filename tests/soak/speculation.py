"""``python -m tests.soak.speculation``: random requests with drafts and without, compared by ``tests.parity``."""

import argparse
import time

from tests.parity.speculation import METHODS, abandon, answer, compare, drafts_of, make_llm, random_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first requests; the others follow")
    parser.add_argument("--at-once", type=int, default=40, help="requests at a time, more than there is room for")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    reference = make_llm()
    engines = {method: make_llm(METHODS[method]) for method in arguments.methods}
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
        stats = drafts_of(llm).stats()
        print(f"{method}: {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts were right")


if __name__ == "__main__":
    main()
