"""The hosts of a run, each of which is one process: how they meet, compare values, watch each other, and end together.

choose_platform()
hosts = start(coordinator, count, index)
hosts.agree_all({"data.path": ...})
with Watch(hosts) as watch, watch.stage("rollout"):
    ...
"""

from tpu_grpo.hosts.caching import keep_programs
from tpu_grpo.hosts.ending import End, InterruptedStop, SignalledStop, StepAbandoned, StopRequest, in_time, this_process
from tpu_grpo.hosts.host_agreement import Hosts, packed, unpacked
from tpu_grpo.hosts.host_log import announce, counted, host_log, with_reminders
from tpu_grpo.hosts.joining import (
    by_host,
    choose_platform,
    devices_per_host,
    hosts_of,
    may_have_others,
    own_slice,
    slices_of,
    start,
)
from tpu_grpo.hosts.watch import Watch, end_all_hosts, progress

__all__ = [
    "End",
    "Hosts",
    "InterruptedStop",
    "SignalledStop",
    "StepAbandoned",
    "StopRequest",
    "Watch",
    "announce",
    "by_host",
    "choose_platform",
    "counted",
    "devices_per_host",
    "end_all_hosts",
    "host_log",
    "hosts_of",
    "in_time",
    "keep_programs",
    "may_have_others",
    "own_slice",
    "packed",
    "progress",
    "slices_of",
    "start",
    "this_process",
    "unpacked",
    "with_reminders",
]
