"""Collectives, and the waits for them."""
