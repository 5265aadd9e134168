"""Parking a model: its memory goes to somebody else for a while, and comes back."""
