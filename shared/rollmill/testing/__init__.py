"""The test kit: fakes and fixtures for tests of Rollmill and of what is built on it. No library code imports it.

- `kafka`, `prometheus`: pytest fixtures; `requirements`: what to do where a program is missing
- `memory_task`: a processor without Kafka; `memory_kafka`: Kafka in memory, with `virtual_time`; `simulation`: agents
  and a model that produce completion records
- `topic_log`: produce to and read from real topics; `processes`: services as processes
- `memory_event_writer`, `tables`: fakes for capture; `http`: fake servers and one ASGI call; `toy_engine`: an engine
  without a model, as a program for a first run
- `samples`: trajectories, batches, sessions, repositories made by hand

It may import the library, and no service.
"""
