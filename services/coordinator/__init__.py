"""The coordinator: knows the engines and places requests."""
