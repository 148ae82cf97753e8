"""What operators see: structured logs, metrics, health; and the clock, so that tests own time."""
