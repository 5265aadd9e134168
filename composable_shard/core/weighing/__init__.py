"""Means over all tokens or samples, where microbatches and ranks have unequal numbers of them."""
