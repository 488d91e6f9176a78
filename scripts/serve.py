"""Serve: python scripts/serve.py MODEL [--port 8000] [section.key=value ...]

Answers OpenAI's, vLLM's and SGLang's HTTP requests with the model of a run, an export, or any other checkpoint. --help
lists the options.
"""

import beside

if __name__ == "__main__":
    beside.run("serve")
