"""What the worker does on an NVIDIA GPU only: few copies, no waiting, graphs of whole steps."""
