"""A folder for ``PYTHONPATH``: a Python that starts with it there has the drop-in."""
