"""Stands in for soundfile, which transcription alone needs."""

__version__ = "0.0.0+stand-in"
