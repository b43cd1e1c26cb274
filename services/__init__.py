"""Wiring: the only place with gRPC, HTTP, environment and sockets."""

import os

# Read by libraries when they load, so set before any of them is imported; whoever sets
# one in the environment overrides it.

# gRPC's C core prints its own lines beside the errors that it returns. Every one of those
# reaches us as an exception, with a text for people.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Threads of a step spin between its kernels and sleep soon after it: compute/threads.py.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")
# One text after the other: the cores belong to the arithmetic.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
