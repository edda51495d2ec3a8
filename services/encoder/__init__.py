"""The encoder turns images and sounds into the rows that stand for them in prompts."""
