"""Reports: one HTML file, which needs no network, about runs, evaluations, rollouts and timings.

page.py         the page and its parts, from plain values
completion.py   a completion whose tokens carry their retention, packed for the browser
assets/         the page's style, and the program of the coloured completion
"""
