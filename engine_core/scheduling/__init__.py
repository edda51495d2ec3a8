"""The scheduler: requests, the waiting queue, the plan of a step and the update from its output."""
