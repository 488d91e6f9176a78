#!/usr/bin/env bash
# jax 0.10.2 (Python 3.12). Importing jax adds a Python function to `gc.callbacks`. If a signal comes while the garbage
# collector works, the signal's handler runs in the first Python code that follows, which is then this function. Python
# drops whatever a collector's callback raises ("Exception ignored in: <function _xla_gc_callback ...>"), so that a
# handler that raises, also KeyboardInterrupt of Ctrl-C, is without effect. Without jax the same exception arrives.
#
# It matters in programs with millions of objects, such as the requests of a large rollout: the collector takes most of
# the time there, and the first Ctrl-C is lost more often than not. `sys.unraisablehook` learns of the loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$folder/seen.py" <<'PYTHON'
import gc
import signal
import sys


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


gc.disable()
many = [[] for _ in range(10_000_000)]  # a collection takes a second or so
if "jax" in sys.argv:
    import jax  # noqa: F401
lost = []
sys.unraisablehook = lambda dropped: lost.append(dropped.exc_type)
signal.signal(signal.SIGVTALRM, stop)
try:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
    gc.collect()
    for _ in range(1000):
        pass
    print("dropped" if lost == [Stop] else "nothing came")
except Stop:
    print("arrived")
PYTHON
without=$("$folder/venv/bin/python" "$folder/seen.py")
with=$("$folder/venv/bin/python" "$folder/seen.py" jax)
echo "what a handler raises while the collector works: $without without jax, $with with jax"
if [ "$without $with" != "arrived dropped" ]; then
    echo "jax no longer drops what a signal's handler raises during a garbage collection"
    exit 1
fi
