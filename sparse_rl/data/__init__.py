"""Problems and texts for training and evaluation.

config.py       the `data:` block of a recipe: the source of a dataset, and the conversion of problems to prompts
problems.py     loads the block's dataset as rows {prompt, answer, completion}
tokens.py       converts prompts and completions to tokens
text.py         cuts a text file into pieces of equal token counts
rows.py         helpers of the two commands below
synthetic.py    helpers of the two tasks below: splits, word tokenizers, small models
running_sum.py  the quickstart's task: its problems, its tokenizer, and an untrained model for it
retrieval.py    a task with facts in a document and questions about them: problems, tokenizer, model configuration
long_texts.py   a command that converts QuALITY and LongHealth to rows: multiple-choice questions about long texts
wikisalad.py    a command that makes questions about interleaved paragraphs
"""
