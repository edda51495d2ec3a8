"""Chooses engines for requests: the rule of the coordinator, and of output processors while the coordinator is away."""
