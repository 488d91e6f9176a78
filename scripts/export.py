"""Export: python scripts/export.py RUN [--step N | --best | --last] --out DIR

Writes the model of a checkpoint as a Hugging Face directory. --help says what else can be asked for.
"""

import sys

from tpu_grpo.cli.export import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
