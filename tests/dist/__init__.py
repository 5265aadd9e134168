"""Sharded modules on one to four ranks: events, state, extensions."""
