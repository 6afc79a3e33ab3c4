"""The mathematics of reinforcement learning: pure functions, each with its source and no I/O."""
