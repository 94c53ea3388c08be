"""A method that the project does not have: after each compaction the queries of a sequence are scaled down.

It is StreamingLLM otherwise. The compactions' times are its section of the record; see test_method_added.py.
"""
