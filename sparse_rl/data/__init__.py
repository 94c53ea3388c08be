"""Problems and texts for training and evaluation.

problems.py loads the dataset of a recipe's `data:` block (config.py), and tokens.py converts prompts and completions to
tokens. choices.py adds options to a multiple-choice question. text.py cuts a text file into pieces. running_sum.py (the
quickstart's task) and retrieval.py generate problems, with helpers in synthetic.py. long_texts.py and wikisalad.py are
commands that convert published datasets to rows.
"""
