"""Export: python scripts/export.py RUN [--step N | --best | --last] --out DIR

Writes the model of a checkpoint as a Hugging Face directory. --help lists the options.
"""

import beside

if __name__ == "__main__":
    beside.run("export")
