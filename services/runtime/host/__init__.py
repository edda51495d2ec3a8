"""Hosts a service: lifecycle, gRPC server, health, settings and background tasks."""
