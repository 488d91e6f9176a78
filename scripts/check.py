"""Check: python scripts/check.py [CONFIG.yaml] [section.key=value ...]

Says row by row whether this machine, or every host of a slice, does what the run needs, and how fast it is.
"""

import beside

if __name__ == "__main__":
    beside.run("check")
