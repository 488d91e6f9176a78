"""One of several processes that test the weight sync on pairs of meshes (tests/weights/test_meshes.py)."""

import sys

from tpu_grpo.hosts import start

if __name__ == "__main__":
    told = dict(word.split("=", 1) for word in sys.argv[1:])
    hosts = start(told["hosts.coordinator"], int(told["hosts.count"]), int(told["hosts.index"]))
    from tests.weights.test_meshes import PAIRS, check_round_trip

    pairs = [pair for pair in PAIRS if pair[-1] > 1]  # so many key-value heads
    for pair in pairs:
        print(pair, flush=True)
        check_round_trip(*pair, hosts)
    hosts.barrier("the end")
    print(f"{len(pairs)} pairs of meshes on {hosts.count} processes", flush=True)
