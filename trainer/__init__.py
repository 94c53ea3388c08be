"""trainer: training under recorded evictions.

grpo.py       RL-Sparse: TRL's GRPOTrainer with our rollouts and replayed traces;  mismatch.py  its panel and guard;
              weights.py  its weights for an engine that has its own
sft.py        supervised fine-tuning with a full cache
resumable.py  what makes any of them resume exactly;  checkpoint.py  a checkpoint on disk, whole or not there
train.py      from a recipe to a run;  rundir.py  what a run leaves;  launch.py, deepspeed.py  N processes and ZeRO
"""
