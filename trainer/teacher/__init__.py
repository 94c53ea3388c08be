"""Training with a dense teacher, which attends to all tokens: the base trainer, and a teacher's log-probs on disk."""
