"""Wiring: the only place with gRPC, HTTP, environment and sockets."""
