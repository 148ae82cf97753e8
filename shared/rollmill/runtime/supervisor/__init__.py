"""Keeps the services of one machine running: started as processes, watched, restarted by exit code, drained in order.

`supervisor` starts and watches programs; `restart_policy` decides by exit code; `stack` runs all five services on one
cluster; `launch` is the entry of each process, so that it ends with its supervisor. Imports: runtime.kafka, settings,
errors; imported by the command line, the demo and tests.

In: programs to run, by name. Out: plain lines about what happens to them; their own logs go to files. State: none on
disk. On a crash of this process the kernel ends the services with it; they continue at the next start.
"""

from rollmill.runtime.kafka.embedded.ports import free_port
from rollmill.runtime.supervisor.restart_policy import RestartPolicy
from rollmill.runtime.supervisor.stack import kafka_environment, running_services
from rollmill.runtime.supervisor.supervisor import DRAIN_ORDER, Program, Supervisor, service_program

__all__ = [
    "DRAIN_ORDER",
    "Program",
    "RestartPolicy",
    "Supervisor",
    "free_port",
    "kafka_environment",
    "running_services",
    "service_program",
]
