"""Forward and backward: what happens when."""
