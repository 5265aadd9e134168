"""Collectives over gloo on the CPU: point to point, and through memory shared within a host."""
