"""Triptych: a server for omni-modality models (text, images, audio, video in; text and streamed speech out)."""

__version__ = "0.1.0"
