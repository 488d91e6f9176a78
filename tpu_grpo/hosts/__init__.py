"""The room of a run's processes: where they run, how they meet, what they agree on, and how they end together.

choose_platform()
hosts = start(coordinator, count, index)
hosts.agree_all({"data.path": ...})
with Watch(hosts) as watch, watch.stage("rollout"):
    ...
"""

from tpu_grpo.hosts.agreement import Hosts
from tpu_grpo.hosts.devices import by_host, devices_per_host, hosts_of
from tpu_grpo.hosts.ending import End, here, in_time
from tpu_grpo.hosts.log import host_log
from tpu_grpo.hosts.platform import choose_platform
from tpu_grpo.hosts.programs import keep_programs
from tpu_grpo.hosts.progress import progress
from tpu_grpo.hosts.start import start
from tpu_grpo.hosts.startup import announce, counted
from tpu_grpo.hosts.stopping import SignalledStop, StepAbandoned, StopRequest
from tpu_grpo.hosts.watch import Watch, end_all_hosts

__all__ = [
    "End",
    "Hosts",
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
    "here",
    "host_log",
    "hosts_of",
    "in_time",
    "keep_programs",
    "progress",
    "start",
]
