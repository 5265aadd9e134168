"""Sharded parameters: when they are gathered, freed and reduced. Imports nothing above it."""
