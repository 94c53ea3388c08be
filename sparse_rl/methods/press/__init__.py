"""Presses of the library kvpress as a cache policy: a press scores the prompt's entries, which are evicted once."""
