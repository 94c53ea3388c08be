"""Prompts of self-study about a context (Attention Matching, appendix C.4): four requests, in our own words.

The prompts are texts; the caller turns them into token ids.
"""

from __future__ import annotations

STUDY_PROMPTS = (
    "Ask three questions that test how well somebody has understood the text above, each about another part of it. "
    "Answer each of them right after it, in full, with the names, numbers and dates that matter.",
    "Summarize the text above. Say what it is about, then go through it from beginning to end, and leave out no "
    "person, fact or figure that a reader may want to look up later.",
    "Write down all that the text above says as one JSON object. Choose keys that fit its content, nest what belongs "
    "together, copy names, numbers and dates exactly, and write nothing but the JSON.",
    "Gather facts that stand far apart in the text above and bring them together: list everything that it says about "
    "each of its main subjects, compare these with each other, count or add up what can be counted, and say what "
    "follows that no single passage says.",
)
