"""Who starts, watches, stops and restarts every process of a run: a pure policy in a thin shell."""
