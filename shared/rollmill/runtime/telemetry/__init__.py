"""What operators see: structured logs, metrics, health; and the clock, which tests replace.

`logging` configures log lines; `catalogue` declares every metric, and `metrics` records them; `health` serves /live,
/ready and /metrics; `clock` gives the time. Imports: models, errors.
"""
