"""What trainings share whose model carries the scorers of a learned policy.

config.py    how scorers go on learning beside another training
loss.py      their boundary loss, on the keys and values of that training's forwards
trainer.py   kept with the model, given to an engine of its own, and compared with what that holds
"""
