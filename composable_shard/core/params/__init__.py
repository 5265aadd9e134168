"""One parameter: its forms, its storage, where it lies and who owns it."""
