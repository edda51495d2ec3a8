"""Control of a running core: pause, sleep, streaming input sessions and utility calls."""
