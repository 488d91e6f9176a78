"""Run on a Cloud TPU slice: python scripts/launch.py create | setup | run | status | logs | stop | delete | babysit

Drives gcloud and prints every command; --dry-run only prints. --help explains the verbs, VERB --help its flags.
"""

import beside

if __name__ == "__main__":
    beside.run("launch")
