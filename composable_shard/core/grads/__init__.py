"""Gradients: from what autograd leaves to what the optimizer sees."""
