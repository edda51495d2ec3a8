"""Generated stubs of the Open Inference Protocol."""
