"""What happens to a group of parameters; imports nothing of the interface above it."""
