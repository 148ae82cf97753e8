"""The shell script that runs a job's steps inside a sandbox, and reports on them. `job_result` parses the reports.

Standard output carries the output of the last step and nothing else. Standard error carries reports, one line each,
some followed by as many bytes as the line's last number; each line begins with a nonce, random for every job. The
steps do not have that stream. A job can still forge a report, as it can forge the output of its own tests; it gains
nothing else by it.
"""

from __future__ import annotations

import shlex

from rollmill.strategies.sandbox import Job
from rollmill_evaluator.sandbox.process import ProcessLimits

SCRIPT = "/.job"
"""Path of the script inside a sandbox: a file, because one argument of a command holds at most 128 KiB."""
REPORT_BYTES = 4000
"""Of the output of each step before the last one; its end is kept."""

HEAD = """\
exec 3>&2 2>&1
report() { printf '%s %s\\n' NONCE "$*" >&3; }
report ready
"""
QUIET = """\
( COMMAND ) </dev/null >/tmp/.step 2>&1 3>&-; code=$?
tail -c LIMIT /tmp/.step >/tmp/.report; rm -f /tmp/.step
report "step NUMBER $code $(($(wc -c </tmp/.report)))"; cat /tmp/.report >&3; rm -f /tmp/.report
[ "$code" = 0 ] || { report "end 0"; exit 0; }
"""
LAST = """\
report "last 0"
( COMMAND ) </dev/null 3>&-; code=$?
report "step NUMBER $code 0"
"""
COLLECT = """\
if [ -f PATH ] && head -c LIMIT PATH >/tmp/.collected; then
  report "file NUMBER $(($(wc -c </tmp/.collected)))"; cat /tmp/.collected >&3
fi
"""
TAIL = 'report "end 0"\nexit 0\n'


def job_script(job: Job, nonce: str) -> str:
    """The POSIX shell text that runs ``job``; its reports begin with ``nonce``."""
    parts = [HEAD.replace("NONCE", nonce)]
    last = len(job.steps) - 1
    for number, step in enumerate(job.steps):
        text = LAST if number == last else QUIET.replace("LIMIT", str(REPORT_BYTES))
        parts.append(text.replace("NUMBER", str(number)).replace("COMMAND", shlex.join(step.argv)))
    for number, path in enumerate(job.collect):
        text = COLLECT.replace("LIMIT", str(job.limits.collect_bytes)).replace("NUMBER", str(number))
        parts.append(text.replace("PATH", shlex.quote(path)))
    return "".join([*parts, TAIL])


def last_step_mark(nonce: str) -> bytes:
    """The report by which a job's last step begins."""
    return f"{nonce} last 0\n".encode()


def report_limit(job: Job) -> int:
    """The most bytes that the reports of ``job`` take, unless it forges some."""
    return (len(job.steps) + 4) * (REPORT_BYTES + 200) + len(job.collect) * (job.limits.collect_bytes + 200)


def process_limits(job: Job, nonce: str) -> ProcessLimits:
    limits = job.limits
    return ProcessLimits(
        limits.prepare_seconds, limits.seconds, last_step_mark(nonce), limits.output_bytes, report_limit(job)
    )
