"""Training of the tiny speaking checkpoint: run from a clone, no part of the installed package."""
