"""TriAttention: evictions by the attention that future queries are expected to pay, from centres of the queries."""
