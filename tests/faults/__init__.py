"""After a failure: the next iteration runs, and nothing is left half done."""
