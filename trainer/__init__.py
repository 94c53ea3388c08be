"""Training under recorded evictions. This package does not read recipes; sparse_rl/commands/trainers.py reads them.

grpo/         RL-Sparse: TRL's GRPOTrainer with our rollouts and replayed traces
distill/      distillation from a teacher under the student's evictions
kvpop/        training of a model and its scorers for learned evictions (KVpop's retrofit)
teacher/      shared by distill/ and kvpop/: the teacher (in memory or cached on disk) and the base trainer
sft/          supervised fine-tuning with a full cache
losses/       the distillation loss
examples.py   the token sequences of a dataset;  batches.py  these sequences as the rows of a forward pass
arguments.py  the training arguments of TRL and transformers;  options.py  the TRL and transformers options we refuse
config.py     the settings that all trainings share
resumable.py  exact resuming, for every trainer;  checkpoint.py  checkpoints on disk, each complete or absent
rundir.py     the files of a run directory;  resume.py  the choice of the checkpoint to resume, and checks of folders
weights.py    a trainer's weights as an engine expects them;  scored/  training the scorers of a learned policy
launch.py     starting several processes;  deepspeed.py  ZeRO;  export.py  the final model of a run

In each folder, config.py holds the settings (it imports no torch) and trainer.py holds the trainer.
docs/internals.md lists every part of TRL and transformers that this package overrides or reads.
"""
