"""Compiles kernels side by side, and while weights are read, on a machine that has none built ahead."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from .compiler import KernelsUnavailable, build
from .prebuilt import Variant


@contextlib.contextmanager
def parallel_build(variants: Sequence[Variant]) -> Iterator[None]:
    """Find or compile these kernels in threads while the body runs; the body's own :func:`.build` of one of them waits
    for it. Leaving waits for what is being compiled, and drops the rest if the body raised."""
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="kernels")
    try:
        builds = [pool.submit(_build, variant) for variant in variants]
        yield
        for each in builds:
            each.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _build(variant: Variant) -> None:
    source, macros = variant
    with contextlib.suppress(KernelsUnavailable):  # the layer that asks for the kernel says so
        build(source, "native", None, **macros)
