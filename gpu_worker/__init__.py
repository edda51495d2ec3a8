"""Workers: models, attention, sampling and the model runner, on the CPU and (later) on GPUs."""
