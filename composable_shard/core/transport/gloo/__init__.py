"""Collectives of gloo on the CPU: from rank to rank, and through memory that a host shares."""
