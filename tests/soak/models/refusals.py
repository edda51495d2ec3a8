"""``python -m tests.soak.models.refusals``: what is refused for its type is refused at once, in one sentence.

A checkpoint of each refused type is given to ``tokenloom serve`` in a process of its own, one after the other; the
command prints how long they took and fails if one took more than two seconds. Run it alone on the machine: the
processor time hardly depends on others, the time that passes does.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from tests.soak.models.transformers_models import quiet
from tokenloom.preflight.model import answer
from tokenloom.preflight.small_files import CannotServe

LIMIT_SECONDS = 2.0


def every_class() -> dict[str, list[str]]:
    """Return the classes of transformers that any of its tables names, by model type: of text, images, sound, heads."""
    found: dict[str, set[str]] = {}
    for table, names in vars(modeling_auto).items():
        if table.endswith("_MAPPING_NAMES") and table != "CONFIG_MAPPING_NAMES":
            for kind, name in names.items():
                found.setdefault(kind, set()).update([name] if isinstance(name, str) else name)
    return {kind: sorted(names - {None}) for kind, names in sorted(found.items()) if kind in CONFIG_MAPPING}


def write_config(kind: str, name: str, directory: Path) -> None:
    """Write the configuration that a type has by default, for one of its classes."""
    entries = CONFIG_MAPPING[kind]().to_diff_dict()
    (directory / "config.json").write_text(
        json.dumps(entries | {"architectures": [name], "model_type": kind, "dtype": "bfloat16"}, default=str)
    )


def refusal(directory: Path) -> str:
    """Return why preflight refuses a configuration; empty if it does not."""
    try:
        answer(directory)
    except CannotServe as error:
        return str(error)
    return ""


class Refused(NamedTuple):
    """How ``tokenloom serve`` refused a type."""

    seconds: float
    processor_seconds: float
    status: int
    sentence: str


def refused_kinds(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the types that are refused with one of their classes, and that class: the causal one if there is one."""
    for kind, names in every_class().items():
        for name in sorted(names, key=lambda name: not name.endswith(("ForCausalLM", "LMHeadModel"))):
            try:
                write_config(kind, name, directory)
            except Exception:
                continue  # a configuration that has no defaults
            if refusal(directory):
                yield kind, name
            break


def serve(path: Path) -> Refused:
    """Give a checkpoint that cannot be served to ``tokenloom serve``."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "tokenloom.cli.main", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Refused(seconds, processor, done.returncode, done.stderr.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try one type of so many")
    chosen = parser.parse_args()
    quiet()
    found, late = list[Refused](), list[str]()
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        directory = Path(folder)
        for kind, name in list(refused_kinds(directory))[:: chosen.every]:
            write_config(kind, name, directory)
            found.append(refused := serve(directory))
            is_late = refused.status != 2 or refused.seconds > LIMIT_SECONDS
            late += [kind] * is_late
            times = f"{refused.seconds:5.2f} s {refused.processor_seconds:5.2f} s"
            print(f"{kind:30} {times} {refused.sentence}", flush=True)
    passed, taken = sorted(each.seconds for each in found), sorted(each.processor_seconds for each in found)
    print(
        f"{len(found)} types: median {median(passed):.2f} s, longest {passed[-1]:.2f} s; of a processor "
        f"{median(taken):.2f} and {taken[-1]:.2f} s; late or not refused: {late or 'none'}"
    )
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
