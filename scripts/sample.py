"""Sample: python scripts/sample.py MODEL ["prompt" ...] [--with MODEL ...] [section.key=value ...]

Lets the model of a run, an export, or any other answer prompts, or talk. --help says what else can be asked for.
"""

import sys

import beside

if __name__ == "__main__":
    beside.prepare()
    from tpu_grpo.cli.sample import main

    sys.exit(main(sys.argv[1:]))
