"""The files of a checkpoint, and tensors as they are stored."""
