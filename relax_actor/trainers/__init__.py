"""Training backends, and the checkpoints they write into."""
