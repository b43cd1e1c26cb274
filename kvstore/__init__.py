"""The KV page manager: who holds which block, and which prefix is where."""
