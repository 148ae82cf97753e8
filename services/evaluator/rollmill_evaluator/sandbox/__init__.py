"""Sandboxes: the backends of `rollmill.strategies.sandbox`.

A job becomes one shell script (`script`), which runs inside of a sandbox as one process tree (`process`): on this
machine with `bubblewrap` (with `seccomp`, `usage`, `cgroups`) or in a container with `docker`. `job_result` parses what
the script reported, `selection` finds which sandboxes this machine has. Nothing is stored on disk. If the service
crashes, the kernel ends bubblewrap's sandboxes; a container ends at its own deadline. Imports the library only.
"""
