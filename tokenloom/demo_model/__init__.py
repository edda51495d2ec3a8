"""The checkpoint that is served when no model is named, `tokenloom-demo`, and in `picture/` `tokenloom-picture`."""
