"""Values made by hand for tests, with defaults for all that a test does not care about.

`sessions`: completion records and sessions, as capture writes them; `trajectories`: as the reward-merger writes them;
`batches`: records of ``batches``, as the batcher writes them; `recorded_messages`: values of a topic in a file;
`repositories`: git repositories and patches. They import the models, and nothing else of the test kit.
"""
