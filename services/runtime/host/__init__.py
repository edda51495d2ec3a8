"""What a service runs on: lifecycle, gRPC server, health, settings and owned tasks."""
