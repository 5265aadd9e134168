"""Seeing what sharded modules do."""
