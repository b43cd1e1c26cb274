"""Wiring: the only place with gRPC, HTTP, environment and sockets."""

import os

# gRPC's C core prints its own lines beside the errors that it returns. Every one of those
# reaches us as an exception, with a text for people; set GRPC_VERBOSITY to see both.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
