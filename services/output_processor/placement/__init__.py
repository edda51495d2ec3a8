"""Where a request runs: picks of the coordinator, the last snapshot, streams to engines."""
