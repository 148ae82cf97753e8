"""event_log."""
