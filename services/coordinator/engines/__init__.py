"""What is known of each engine, which of them are picked, and what they are asked to do."""
