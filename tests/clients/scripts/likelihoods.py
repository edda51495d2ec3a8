"""What transformers makes of pairs of context and continuation: JSON in, JSON out."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    found = []
    for context, continuation in json.load(sys.stdin):
        before = tokenizer(context).input_ids
        after = tokenizer(context + continuation).input_ids[len(before) :]
        before = before or [tokenizer.eos_token_id]  # as lm_eval begins a text
        ids = torch.tensor([before + after])
        with torch.inference_mode():
            told = model(ids).logits[0, :-1].float().log_softmax(-1)[len(before) - 1 :]
        target = ids[0, len(before) :]
        total = told.gather(1, target[:, None]).sum().item()
        greedy = bool((told.argmax(-1) == target).all())
        found.append({"sum": total, "greedy": greedy, "tokens": len(target)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
