"""KVpop keeps sinks, window, and the other tokens that a model's scorers rank highest. DMS evicts by learned gates."""
