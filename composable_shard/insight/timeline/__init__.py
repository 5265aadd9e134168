"""Timelines: what each rank did when, from the marks it makes to the pages people look at.

``recording`` hears, stamps and writes the file of a rank; ``spans`` turns stamps into spans;
``analysis`` compares ranks; ``page`` shows them; ``merging`` does all of that for a folder.
"""
