"""Versions of the policy, from the trainer's side. May import the modules at the top of `rollmill.trainer`.

publisher: `PolicyPublisher` announces versions. history: the announcements read from ``policies``. capture_client:
`Captures`, which pauses captures while engines load new weights.
"""
