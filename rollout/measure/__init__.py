"""rollout.measure measures pass@k of tasks, and the perplexity of a text, under each of several cache policies; head
budgets; time and memory of sampling. It knows nothing of recipes, rewards, tokenizers and plots.
"""
