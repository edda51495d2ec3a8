"""Make the demo model: generate text, train a tokenizer and the model, evaluate. See README.md."""
