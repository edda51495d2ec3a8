"""What is known of requests that have ended: the last ones, and a line of the log for each. No prompts, no keys."""
