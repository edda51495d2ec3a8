"""What a layer computes between its matrices: one interface, PyTorch's operations or fused C++."""
