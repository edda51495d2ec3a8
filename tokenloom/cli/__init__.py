"""The `tokenloom` command, a module for each subcommand."""
