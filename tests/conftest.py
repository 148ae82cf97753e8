"""Fixtures for all tests."""

pytest_plugins = ["rollmill.testing.kafka"]
