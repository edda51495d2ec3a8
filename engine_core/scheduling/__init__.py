"""Schedules requests: holds their state and the waiting queue, plans steps and processes their results."""
