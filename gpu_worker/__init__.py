"""Workers run a model: attention, layers, sampling and the model runner, on the CPU or a GPU."""
