"""Speech is transcribed as transformers' Whisper does: ``python -m tests.e2e.speech``.

espeak-ng speaks sentences in four languages, and two texts that are longer than the model hears at once. A mesh and
transformers write them down with the same checkpoint, by default a tiny one of random weights; the command prints the
word error rate of the mesh's text against transformers', and of both against what was said, which says something of
trained weights only. It ends with status 1 if a text, a segment or a token differs.
"""

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.checkpoints.whole_sound import write_whole_sound
from tests.e2e.conftest import serving
from tests.e2e.test_transcriptions import Reference
from tokenloom.gpu_worker.towers.sound_file import read_sound

_WORDS = {
    "en": "the one who reads this line hears seven grey birds above a slow river and counts them before night falls",
    "de": "wer diese Zeile liest hört sieben graue Vögel über einem langsamen Fluss und zählt sie bevor es Nacht wird",
    "fr": "celui qui lit cette ligne entend sept oiseaux gris au dessus d'une rivière lente et les compte la nuit",
    "es": "quien lee esta línea oye siete pájaros grises sobre un río lento y los cuenta antes de que caiga la noche",
}
_LONG_SENTENCES = 14
"""Of a text that takes more than 60 s to say."""


@dataclass(frozen=True)
class Said:
    """A text, and the file in which it is spoken."""

    text: str
    language: str
    file: bytes
    is_long: bool


def texts(count: int, seed: int) -> list[tuple[str, str, bool]]:
    """Return ``count`` sentences with their languages, and two long texts."""
    rng = random.Random(seed)

    def sentence(language: str) -> str:
        words = _WORDS[language].split()
        return " ".join(rng.sample(words, rng.randint(3, 9))) + f" {rng.randint(1, 999)}"

    languages = [list(_WORDS)[number % len(_WORDS)] for number in range(count)]
    found = [(sentence(language), language, False) for language in languages]
    return found + [(". ".join(sentence(each) for _ in range(_LONG_SENTENCES)), each, True) for each in ("en", "de")]


def speak(espeak: Sequence[str], text: str, language: str, speed: int) -> bytes:
    """Return a WAV file. ``speed``: words a minute."""
    command = [*espeak, "-v", language, "-s", str(speed), "--stdout", text]
    return subprocess.run(command, capture_output=True, check=True).stdout


def word_errors(wanted: str, found: str) -> tuple[int, int]:
    """Return the least number of words to replace, add or leave out, and the number of words of ``wanted``."""
    right, words = wanted.lower().split(), found.lower().split()
    row = list(range(len(words) + 1))
    for index, word in enumerate(right, 1):
        before, row[0] = row[0], index
        for place, other in enumerate(words, 1):
            before, row[place] = row[place], min(before + (word != other), row[place] + 1, row[place - 1] + 1)
    return row[-1], len(right)


def compare(url: str, reference: Reference, said: Said) -> tuple[str, str, list[str]]:
    """Return the mesh's text, transformers' text, and what differs."""
    samples, fields = read_sound(said.file), {"language": said.language}
    theirs, differs = "", list[str]()
    if not said.is_long:
        theirs = reference.text(samples, language=said.language).strip()
        ours = str(_post(url, said.file, **fields)["text"])
    else:
        segments = reference.segments(samples, language=said.language)
        kept = [each for each in segments if reference.decoded(each["tokens"]).strip()]
        theirs = "".join(reference.decoded(each["tokens"]) for each in kept).strip()
        answer = _post(url, said.file, response_format="verbose_json", **fields)
        ours = str(answer["text"])
        if [each["tokens"] for each in answer["segments"]] != [each["tokens"].tolist() for each in kept]:
            differs.append("the tokens of segments")
        times = [(round(each["start"], 2), round(each["end"], 2)) for each in answer["segments"]]
        if times != [(round(float(each["start"]), 2), round(float(each["end"]), 2)) for each in kept]:
            differs.append("the times of segments")
    return ours, theirs, differs + (["the text"] if ours != theirs else [])


def _post(url: str, file: bytes, **fields: Any) -> Any:
    files = {"file": ("speech.wav", file)}
    response = httpx.post(f"{url}/v1/audio/transcriptions", data=fields, files=files, timeout=600)
    response.raise_for_status()
    return response.json()


def run(url: str, reference: Reference, spoken: Sequence[Said]) -> int:
    """Print a table, and return how many texts differ."""
    num_wrong, num_different = 0, set[str]()
    errors = {
        name: [0, 0] for name in ("mesh against transformers", "mesh against the text", "transformers against it")
    }
    for said in spoken:
        ours, theirs, differs = compare(url, reference, said)
        num_wrong += bool(differs)
        num_different.add(ours)
        for name, pair in zip(errors, ((theirs, ours), (said.text, ours), (said.text, theirs)), strict=True):
            for index, value in enumerate(word_errors(*pair)):
                errors[name][index] += value
        for each in differs:
            print(f"{said.language} {said.text[:60]!r}: {each} differ")
    print(f"{len(spoken)} texts, {len(num_different)} different transcripts, {num_wrong} not as transformers'")
    for name, (wrong, words) in errors.items():
        print(f"word error rate, {name}: {wrong / max(words, 1):.3f} of {words} words")
    # Weights that write the same whatever is said would hide every difference.
    return num_wrong + (len(num_different) < len(spoken) // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--espeak", default="espeak-ng", help="command that speaks, with its options [espeak-ng]")
    parser.add_argument("--sentences", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="folder of a Whisper checkpoint [a tiny one of random weights]")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    spoken = [
        Said(text, language, speak(shlex.split(arguments.espeak), text, language, rng.randint(120, 200)), is_long)
        for text, language, is_long in texts(arguments.sentences, arguments.seed)
    ]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, serving() as serve:
        path = arguments.model or write_whole_sound("whisper", Path(folder))
        mesh = serve(str(path), "--dtype", "float32")
        return min(run(mesh.url, Reference(path), spoken), 1)


if __name__ == "__main__":
    sys.exit(main())
