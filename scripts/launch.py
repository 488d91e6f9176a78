"""Run on a Cloud TPU slice: python scripts/launch.py create | setup | run | status | logs | stop | delete | babysit

Drives gcloud and prints every command; --dry-run only prints. --help explains the verbs, VERB --help its flags.
"""

import sys

import beside

if __name__ == "__main__":
    beside.prepare()
    from tpu_grpo.cli.launch import main

    sys.exit(main(sys.argv[1:]))
