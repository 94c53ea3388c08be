"""Mixture of experts: the experts that a token takes are a decision, which the sampler records and the trainer replays.

A router that is close to a tie chooses other experts if its input differs in the last bit, and the log-probs then
differ by more than any rounding. So the choices are part of the trace (section `routed`), beside the evictions. The
weights of the chosen experts are numbers; both sides compute them from the router's logits, with gradients in training.
"""
