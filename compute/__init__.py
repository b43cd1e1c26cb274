"""Arithmetic over page pools: weights, decoder, paged attention, sampling, steps."""
