"""One request: its samples, its attempts on engines, its journal."""
