"""What a client asked for, whichever edge it came through."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenloom.v1 import output_processor_pb2, types_pb2

from .embeds_prompt import EmbedsPrompt


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, as the tokenizer's template takes it."""

    messages_json: bytes
    tools_json: bytes = b""
    template_kwargs_json: bytes = b""
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asked for, checked for form but not yet against the model's limits."""

    prompts: Chat | Sequence[str | Sequence[object] | EmbedsPrompt]
    """A conversation, texts, lists of what should be token ids, or prompts with embeddings."""
    prompt_field: str
    """What the client calls it, for errors."""
    sampling: types_pb2.SamplingParams
    """Only what the client set."""
    text: output_processor_pb2.TextOptions = field(default_factory=output_processor_pb2.TextOptions)
    ignore_eos: bool = False
    priority: int = 0
    """Lower runs first, as the client asks: the gateway may raise it."""
    num_samples: int = 1
    """Of each prompt."""
    bad_words: Sequence[str] = ()
    """Texts that must not appear."""
    truncate_prompt_tokens: int | None = None
    """Only the last so many tokens of a prompt count; -1: as many as leave room for the answer."""
    add_special_tokens: bool = True
    """To texts; a chat's template has its own."""
    echo: bool = False
    """The prompt's text is wanted too."""
    before: Sequence[int] = ()
    """Tokens that a single prompt continues: earlier turns of a session."""
    timeout: float | None = None
    """Seconds; None: the gateway's default."""

    @property
    def texts(self) -> Sequence[str | bytes]:
        """What is to be encoded."""
        if isinstance(self.prompts, Chat):
            return [self.prompts.messages_json]
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]
