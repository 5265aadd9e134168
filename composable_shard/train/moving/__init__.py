"""Moving a model and its optimizers to other ranks, without a disk."""
