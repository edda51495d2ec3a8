"""Sockets that a process has inherited and that outlive it, such as those of the supervisor."""
