"""The Open Inference Protocol (KServe's v2) over gRPC."""
