"""Modules of ``train`` as they are on this core."""
