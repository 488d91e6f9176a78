"""Plan: python scripts/plan.py CONFIG.yaml [section.key=value ...] --slice v5e-16

Says whether the run fits the slice, and how long a step takes, by compiling its programs without a TPU.
"""

import beside

if __name__ == "__main__":
    beside.run("plan")
