"""trainer: training under recorded evictions. Values in: it knows no recipe (sparse_rl/commands/trainers.py does).

grpo/         RL-Sparse: TRL's GRPOTrainer with our rollouts and replayed traces
distill/      a teacher's answers under the student's evictions;  kvpop/  a retrofit with learned evictions;
              teacher/  what both share: the teacher, in memory or written down, and the trainer that listens to it
sft/          supervised fine-tuning with a full cache
losses/       what is minimised against a teacher, and against the future (boundary.py)
examples.py   the token sequences that a dataset gives;  batches.py  the rows of a forward that they become
arguments.py  what TRL and transformers are given;  options.py  what of theirs is refused
config.py     what every training is told
resumable.py  what makes any of them resume exactly;  checkpoint.py  a checkpoint on disk, whole or not there
rundir.py     what a run leaves;  resume.py  which checkpoint is resumed, and which folders are used
weights.py    a trainer's weights as an engine has them;  scored/  a learned policy's scorers beside another training
launch.py, deepspeed.py  N processes and ZeRO;  export.py  the model that a run ends with

Each folder has config.py, what it is told (no torch), trainer.py, and what that is made of. What is overridden or read
of TRL and transformers is in docs/internals.md.
"""
