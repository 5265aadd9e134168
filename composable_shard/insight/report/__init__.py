"""How results are shown: as text, by rich, in a notebook, as a dict."""
