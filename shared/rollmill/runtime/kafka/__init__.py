"""Kafka: clients, topics on the broker, and the embedded broker."""
