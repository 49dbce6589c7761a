"""The parts of the generated media corpus; see `tests/media_corpus.py`."""
