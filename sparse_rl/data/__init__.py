"""Problems and texts to train on and to evaluate with.

config.py       the `data:` block of a recipe: where a dataset is, and how a problem becomes a prompt
problems.py     from that block to rows {prompt, answer, completion}
tokens.py       from a prompt or a completion to tokens
text.py         from a text file to pieces of equally many tokens
rows.py         what the two commands below share
synthetic.py    what the two tasks below share: splits, tokenizers of words, small models
running_sum.py  the quickstart's task: its problems, its tokenizer, and an untrained model for it
retrieval.py    facts in a document, and questions about them: the task, its tokenizer, its model's configuration
long_texts.py   a command that makes rows of QuALITY and LongHealth, multiple choice about long texts
wikisalad.py    a command that makes questions about interleaved paragraphs
"""
