"""A method made up for the tests: after each compaction the queries of a sequence are scaled down.

Otherwise it is StreamingLLM. Its section of the trace holds the times of the compactions; see test_method_added.py.
"""
