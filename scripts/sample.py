"""Sample: python scripts/sample.py MODEL ["prompt" ...] [--with MODEL ...] [section.key=value ...]

Lets the model of a run, an export, or any other answer prompts, or talk. --help says what else can be asked for.
"""

import sys

from tpu_grpo.cli.sample import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
