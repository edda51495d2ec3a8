"""What quantized checkpoints cost in accuracy, and gain in their products."""
