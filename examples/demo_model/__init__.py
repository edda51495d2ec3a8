"""How the demo model is made: text from a script, a tokenizer, a short training run, an evaluation. See README.md."""
