"""Writes the prompts with which Whisper's models transcribe sounds, as the checkpoint's files say."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import digest_of
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.tokenizer_pb2 import (
    TRANSCRIPT_TASK_TRANSLATE,
    TRANSCRIPT_TASK_UNSPECIFIED,
    EncodeTranscriptRequest,
    TokenizedPrompt,
    TranscriptLanguage,
    TranscriptTraits,
)
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MediaItem

from .media_reader import digest_of_parts, read_entries
from .media_text import Entries

MODEL_TYPE: Final = "whisper"
"""Of ``config.json``."""
_FILES: Final = ("config.json", "preprocessor_config.json")
"""What the rows of a sound depend on, beside the weights."""
_ROWS_PER_SECOND: Final = 50
_FRAMES_PER_ROW: Final = 2
_MAX_INITIAL_TIMESTAMP: Final = 50
"""One second, as OpenAI's reference has it, where the checkpoint says nothing."""
_NAMES: Final = """
    en english|zh chinese,mandarin|de german|es spanish,castilian|ru russian|ko korean|fr french|ja japanese
    |pt portuguese|tr turkish|pl polish|ca catalan,valencian|nl dutch,flemish|ar arabic|sv swedish|it italian
    |id indonesian|hi hindi|fi finnish|vi vietnamese|he hebrew|uk ukrainian|el greek|ms malay|cs czech
    |ro romanian,moldavian,moldovan|da danish|hu hungarian|ta tamil|no norwegian|th thai|ur urdu|hr croatian
    |bg bulgarian|lt lithuanian|la latin|mi maori|ml malayalam|cy welsh|sk slovak|te telugu|fa persian|lv latvian
    |bn bengali|sr serbian|az azerbaijani|sl slovenian|kn kannada|et estonian|mk macedonian|br breton|eu basque
    |is icelandic|hy armenian|ne nepali|mn mongolian|bs bosnian|kk kazakh|sq albanian|sw swahili|gl galician
    |mr marathi|pa punjabi,panjabi|si sinhala,sinhalese|km khmer|sn shona|yo yoruba|so somali|af afrikaans
    |oc occitan|ka georgian|be belarusian|tg tajik|sd sindhi|gu gujarati|am amharic|yi yiddish|lo lao|uz uzbek
    |fo faroese|ht haitian creole,haitian|ps pashto,pushto|tk turkmen|nn nynorsk|mt maltese|sa sanskrit
    |lb luxembourgish,letzeburgesch|my myanmar,burmese|bo tibetan|tl tagalog|mg malagasy|as assamese|tt tatar
    |haw hawaiian|ln lingala|ha hausa|ba bashkir|jw javanese|su sundanese|yue cantonese
"""
NAMES: Final[Mapping[str, Sequence[str]]] = {
    code: names.split(",")
    for code, _, names in (each.strip().partition(" ") for each in _NAMES.replace("\n", "").split("|"))
}
"""English names of languages by the codes of Whisper's tokens."""


@dataclass(frozen=True)
class TranscriptPrompts:
    """Writes the prompts of one checkpoint.

    Attributes:
        traits: What gateways have to know of the model.
    """

    traits: TranscriptTraits
    _tokenizer: Tokenizer
    _fingerprint: bytes
    """SHA-256 over the files on which the rows of a sound depend."""
    _num_rows: int
    """Of each piece, however short: the model hears silence behind it."""
    _max_previous: int
    """Tokens of the text before."""
    _start_id: int
    _previous_id: int | None
    """Begins the text before; None: the checkpoint has no token for it."""
    _task_ids: Mapping[int, int]
    """By ``TranscriptTask``; empty if the model knows one language only."""

    @classmethod
    def of_checkpoint(cls, path: Path, tokenizer: Tokenizer) -> "TranscriptPrompts | None":
        """Return what writes the prompts of a checkpoint's model; None: it does not transcribe.

        Raises ``InvalidArgument`` for files with entries that are wrong, and for a tokenizer without Whisper's tokens.
        """
        values = read_entries(path / "config.json")
        if values.get("model_type") != MODEL_TYPE:
            return None
        config = Entries(values, "config.json")
        generation = Entries(read_entries(path / "generation_config.json"), "generation_config.json")
        files = _Files(generation, tokenizer)
        languages = files.languages() if files.is_multilingual(config) else []
        rows, rate = (
            config.number("max_source_positions", 1500),
            Entries(read_entries(path / "preprocessor_config.json"), "preprocessor_config.json").number(
                "sampling_rate", 16_000
            ),
        )
        row_samples = rate // _ROWS_PER_SECOND
        no_timestamps = files.token("no_timestamps_token_id", "<|notimestamps|>")
        traits = TranscriptTraits(
            sampling_rate=rate,
            piece_samples=rows * row_samples,
            frame_samples=row_samples // _FRAMES_PER_ROW,
            timestamp_samples=row_samples,
            languages=languages,
            first_timestamp_id=no_timestamps + 1,
            no_timestamps_id=no_timestamps,
            max_initial_timestamp=generation.count("max_initial_timestamp_index", _MAX_INITIAL_TIMESTAMP),
            no_speech_id=no_timestamps - 1,  # its name differs between the versions of the model, its place does not
            suppressed_ids=files.ids("suppress_tokens"),
            begin_suppressed_ids=files.ids("begin_suppress_tokens"),
            first_special_id=files.token("", "<|endoftext|>"),
        )
        tasks = ("<|transcribe|>", "<|translate|>") if languages else ()
        return cls(
            traits,
            tokenizer,
            digest_of(path / name for name in _FILES if (path / name).is_file()),
            rows,
            config.number("max_target_positions", 448) // 2 - 1,
            files.token("decoder_start_token_id", "<|startoftranscript|>"),
            tokenizer.token_to_id("<|startofprev|>"),
            {number: files.token("", token) for number, token in enumerate(tasks, 1)},
        )

    def encode(self, request: EncodeTranscriptRequest) -> TokenizedPrompt:
        """Return the prompt of a piece of a sound, and the piece as an item. Raises ``InvalidArgument``."""
        sound, traits = request.sound, self.traits
        if not 0 < request.samples <= min(traits.piece_samples, sound.samples - request.start):
            raise InvalidArgument("the piece is not within the sound, or too long", "file")
        # Canonical: the same piece has the same rows.
        options = b'{"samples":%d,"start":%d}' % (request.samples, request.start)
        parts = (request.cache_salt, sound.digest, self._fingerprint, options, struct.pack("<Q", self._num_rows))
        item = MediaItem(
            key=digest_of_parts(parts),
            kind=MEDIA_KIND_AUDIO,
            num_rows=self._num_rows,
            levels=1,
            encoder=sound.encoder,
            digest=sound.digest,
            options_json=options,
            num_in_prompt=1,
        )
        return TokenizedPrompt(token_ids=[*self._before(request), *self._beginning(request)], media=[item])

    def _before(self, request: EncodeTranscriptRequest) -> list[int]:
        if self._previous_id is None or not (text := request.previous_text.strip()):
            return []
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([" " + text], add_special_tokens=False)
        except Exception as error:
            raise InvalidArgument("prompt: the tokenizer fails on this text.", "prompt") from error
        if (special := max(encoding.ids, default=0)) >= self.traits.first_special_id:
            token = self._tokenizer.id_to_token(special)
            raise InvalidArgument(f"prompt spells the special token {token}", "prompt")
        return [self._previous_id, *encoding.ids[-self._max_previous :]]

    def _beginning(self, request: EncodeTranscriptRequest) -> list[int]:
        ids, languages = [self._start_id], self.traits.languages
        if request.task == TRANSCRIPT_TASK_UNSPECIFIED:
            return ids
        if languages:
            found = next((each for each in languages if each.code == request.language), None)
            if found is None:
                raise InvalidArgument(f"language {request.language[:32]!r} is not one of the model's", "language")
            ids += found.token_id, self._task_ids[request.task]
        elif request.task == TRANSCRIPT_TASK_TRANSLATE or request.language not in ("", "en"):
            raise InvalidArgument("this model knows English only: it transcribes and does not translate", "language")
        return ids if request.with_timestamps else [*ids, self.traits.no_timestamps_id]


@dataclass(frozen=True)
class _Files:
    """Reads tokens from ``generation_config.json``, or as the tokenizer spells them."""

    generation: Entries
    tokenizer: Tokenizer

    def token(self, entry: str, spelled: str) -> int:
        """Return the id of a token. ``entry``: that names the id; empty: none does. Raises ``InvalidArgument``."""
        if entry and entry in self.generation:
            return self.generation.count(entry)
        found: int | None = self.tokenizer.token_to_id(spelled)
        if found is None:
            raise InvalidArgument(f"model: the tokenizer has no token {spelled}", "model")
        return found

    def is_multilingual(self, config: Entries) -> bool:
        """Return whether prompts name a language. Tokenizers of English-only models have the tokens of all too."""
        return self.generation.flag("is_multilingual", default=config.number("vocab_size", 51865) >= 51865)

    def languages(self) -> list[TranscriptLanguage]:
        """Return the languages for which there are tokens."""
        found = []
        for code, names in NAMES.items():
            if (token_id := self.tokenizer.token_to_id(f"<|{code}|>")) is not None:
                found.append(TranscriptLanguage(code=code, names=names, token_id=token_id))
        return found

    def ids(self, entry: str) -> list[int]:
        """Return a list of ids; empty: there is none."""
        return [each for each in self.generation.items(entry) if type(each) is int and each >= 0]
