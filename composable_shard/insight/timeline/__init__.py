"""Timelines: what each rank did when, from the marks it makes to the pages people look at.

``recorder`` hears and stamps, ``spans`` turns stamps into spans, ``rank_trace`` is the file of a
rank; ``alignment``, ``lateness`` and ``summary`` compare ranks; ``chrome``, ``page`` and
``picture`` show them; ``merging`` does all of that for a folder.
"""
