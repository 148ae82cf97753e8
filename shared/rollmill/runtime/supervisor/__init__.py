"""Keeps the services of one machine running: started as processes, watched, restarted by exit code, drained in order.

In: programs to run, by name. Out: plain lines about what happens to them; their own logs go to files. State: none on
disk. On a crash of this process the kernel ends the services with it; they continue at the next start.
"""

from rollmill.runtime.supervisor.program import DRAIN_ORDER, Program, free_port, service_program
from rollmill.runtime.supervisor.restart_policy import RestartPolicy
from rollmill.runtime.supervisor.stack import kafka_environment, running_services
from rollmill.runtime.supervisor.supervisor import Supervisor

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
