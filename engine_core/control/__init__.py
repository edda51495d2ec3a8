"""Controls a running core: pause, sleep, sessions with streaming input, and utility calls."""
