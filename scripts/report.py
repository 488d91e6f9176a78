"""Report: python scripts/report.py RUN [--output FILE.html]

Writes a page that shows a run, also while it goes on.
"""

import beside

if __name__ == "__main__":
    beside.run("report")
