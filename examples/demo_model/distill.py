"""Train drafts for speculative decoding: small models that predict what the demo model says next.

Both learn the demo model's own distribution of each token, not the text, because a draft counts only where it equals
what the demo model draws.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

IGNORED = -100
_HEAD_PASSES = (1.0, 0.7, 0.5)
"""Weight of the head's loss after so many of its own predictions: a draft of several tokens builds on them."""


def load_teacher(folder: Path) -> Any:
    """Return the demo model, which is not changed."""
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    teacher.requires_grad_(False)
    return teacher


class DraftModel(nn.Module):
    """Trains a Qwen3 decoder of two layers and 0.2 M parameters with the demo model's vocabulary."""

    def __init__(self, teacher: Any, num_text_steps: int) -> None:
        """The first ``num_text_steps`` steps learn the text that the demo model learned, which needs no demo model and
        thus a fifth of the time."""
        super().__init__()
        self._num_text_steps = num_text_steps
        self._teacher = [teacher]  # a list, so that its parameters are not part of this module
        config = Qwen3Config(
            vocab_size=teacher.config.vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=96,
            max_position_embeddings=teacher.config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=teacher.config.eos_token_id,
            pad_token_id=teacher.config.pad_token_id,
            initializer_range=0.05,
        )
        self.draft: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean divergence from the demo model's distribution where it speaks."""
        wanted = labels != IGNORED
        hidden = self.draft.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.draft.lm_head(hidden[wanted])
        self._num_text_steps -= 1
        if self._num_text_steps >= 0:
            return nn.functional.cross_entropy(logits, labels[wanted])
        return divergence(target_logits(self._teacher[0], ids, wanted)[1], logits)

    def save(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write a checkpoint in bf16."""
        self.draft.to(torch.bfloat16).save_pretrained(folder)


class EagleHead(nn.Module):
    """Trains one Llama layer that predicts the demo model's next hidden state from a token and the state before it."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self._teacher = [teacher]
        hidden = teacher.config.hidden_size
        # Imported here: it takes two seconds, which the readers of the other functions need not wait.
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.config = LlamaConfig(
            vocab_size=teacher.config.vocab_size,
            hidden_size=hidden,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            intermediate_size=64,
            max_position_embeddings=teacher.config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=teacher.config.eos_token_id,
        )
        self.config._attn_implementation = "sdpa"
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(self.config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self._rotary = LlamaRotaryEmbedding(self.config)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Predict hidden states [rows, length, hidden] from embeddings of tokens and the states before them."""
        x = self.fc(torch.cat((embeddings, states), dim=-1))
        places = torch.arange(x.shape[1])[None]
        output = self.layers[0](x, position_embeddings=self._rotary(x, places))
        return output[0] if isinstance(output, tuple) else output

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the divergence from the demo model's distribution after one and more of the head's predictions."""
        teacher = self._teacher[0]
        wanted = labels != IGNORED
        states, logits = target_logits(teacher, ids, wanted)
        embeddings, predicted, loss = teacher.model.embed_tokens(ids), states, torch.zeros(())
        for weight in _HEAD_PASSES:
            # Zeros are the state before the first token.
            predicted = self(embeddings, nn.functional.pad(predicted[:, :-1], (0, 0, 1, 0)))
            loss = loss + weight * divergence(logits, teacher.lm_head(predicted[wanted]))
            loss = loss + 0.1 * weight * nn.functional.smooth_l1_loss(predicted[wanted], states[wanted])
        return loss

    def save(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write a checkpoint in bf16, without the embedding and the output layer, which are the demo model's."""
        folder.mkdir(parents=True, exist_ok=True)
        entries = self.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def target_logits(teacher: Any, ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the demo model's last hidden states [rows, length, hidden], and its logits [n, vocab] where ``wanted``."""
    states = teacher.model(input_ids=ids, use_cache=False).last_hidden_state
    return states, teacher.lm_head(states[wanted])


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of logits [n, vocab] from the target's."""
    return nn.functional.kl_div(draft.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
