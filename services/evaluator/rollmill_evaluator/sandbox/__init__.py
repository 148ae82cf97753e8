"""Sandboxes: the backends of `rollmill.strategies.sandbox`.

A job becomes one shell script (`script`) that runs inside of a sandbox as one process tree (`running`), on this
machine's own system (`bubblewrap`, with `seccomp`, `usage`, `cgroups`) or in a container (`docker`); `outcomes` reads
what it came to, `choosing` finds what this machine has. Nothing is kept on disk. On a crash of the service the kernel
ends bubblewrap's sandboxes; a container ends by its own deadline.
"""
