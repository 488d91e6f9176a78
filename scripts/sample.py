"""Sample: python scripts/sample.py MODEL "prompt" ... [section.key=value ...]

Lets a model answer prompts: that of a run, an export, or any other checkpoint. --help lists the options.
"""

import beside

if __name__ == "__main__":
    beside.run("sample")
