"""Capture: the proxy in front of an engine. Every call of an agent becomes a record in the log."""
