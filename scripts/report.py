"""Report: python scripts/report.py RUN [RUN ...] [--output FILE.html]

Writes a page that shows a run, also while it goes on, or one that compares several.
"""

import beside

if __name__ == "__main__":
    beside.run("report")
