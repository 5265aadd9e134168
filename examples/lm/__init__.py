"""The parts of ``train_lm.py``: the model, its text, its ranks, its checkpoints and its report."""
