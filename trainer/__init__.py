"""Training under recorded evictions. This package knows no recipes; sparse_rl/commands/trainers.py reads them.

grpo/         RL-Sparse: TRL's GRPOTrainer with our rollouts and replayed traces
distill/      distillation from a teacher under the student's evictions;  kvpop/  a retrofit with learned evictions;
              teacher/  shared by both: the teacher (in memory or cached on disk) and the base trainer
sft/          supervised fine-tuning with a full cache
losses/       the distillation loss
examples.py   the token sequences of a dataset;  batches.py  these sequences as the rows of a forward pass
arguments.py  the arguments of TRL and transformers;  options.py  their options that are refused
config.py     the settings that all trainings share
resumable.py  exact resuming, for every trainer;  checkpoint.py  checkpoints on disk, complete or absent
rundir.py     the files of a run directory;  resume.py  the choice of the checkpoint to resume, and checks of folders
weights.py    a trainer's weights as an engine expects them;  scored/  training the scorers of a learned policy
launch.py, deepspeed.py  several processes, and ZeRO;  export.py  the final model of a run

Each folder has its settings in config.py (no torch), and its trainer in trainer.py with the modules that it uses.
docs/internals.md lists everything of TRL and transformers that is overridden or read.
"""
