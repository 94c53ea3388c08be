"""RL under a sparse cache: TRL's GRPOTrainer with rollouts from our engine, trained under their traces."""
