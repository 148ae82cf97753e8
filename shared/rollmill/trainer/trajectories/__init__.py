"""Trajectories for trainers that batch themselves (rule A9). May import the top of `rollmill.trainer`.

stream: `TrajectoryStream`, synchronous. consumer: the same on an event loop, with Kafka. offset_watermark: which
records are finished when they are finished out of order.
"""
