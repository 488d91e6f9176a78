"""This room shows runs to people: a page of one run, also while it goes on, and a page that compares several.

page.py        the page of a run: what stands on it;  overview.py: its figures, settings and sentence
comparison.py  the page of several runs
live.py        writes the page while the run goes on, and however it ends
reading.py     what is read from a run's directory, all of which may be missing
standing.py    how a run stands: going on, done, stopped, failed, or gone without a word
charts.py      what each chart shows
samples.py     completions as tables: of the first, a middle and the last step, and held-out ones before and after
drawing.py     a chart becomes HTML and SVG;  axes.py: ranges and labels;  thinning.py: few points of many
templates/     the pages' HTML, style and script

Nothing here imports jax. A page needs nothing but itself: no network, and scripts only for what shows on hover.
"""
