"""Serve: python scripts/serve.py MODEL [--port 8000] [section.key=value ...]

Answers OpenAI's, vLLM's and SGLang's requests with the model of a run, an export, or any other. --help says the rest.
"""

import sys

import beside

if __name__ == "__main__":
    beside.prepare()
    from tpu_grpo.cli.serve import main

    sys.exit(main(sys.argv[1:]))
