"""What transformers makes of pairs of context and continuation: JSON in, JSON out."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    found = []
    for context, continuation in json.load(sys.stdin):
        num_before = len(tokenizer(context).input_ids)
        ids = torch.tensor([tokenizer(context + continuation).input_ids])
        with torch.inference_mode():
            told = model(ids).logits[0, :-1].float().log_softmax(-1)[num_before - 1 :]
        target = ids[0, num_before:]
        total = told.gather(1, target[:, None]).sum().item()
        greedy = bool((told.argmax(-1) == target).all())
        found.append({"sum": total, "greedy": greedy, "tokens": len(target)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
