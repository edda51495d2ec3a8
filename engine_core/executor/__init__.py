"""Executors compute the core's steps on workers: in the core's thread, in a thread or in processes of their own."""
