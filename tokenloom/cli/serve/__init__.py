"""``tokenloom serve``, and ``tokenloom config``, which prints what it would run with."""
