"""Sessions at a capture, from an agent's harness: open, run, close. With Python's own HTTP, so that nothing is needed
beside ``pip install rollmill``.

    with rollmill.session(task="say-7", group="g1", group_size=8) as session:
        client = OpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        session.finish(output={"answer": 7}, reward=1.0)

``rollmill.client.reward(session_id, 0.5)`` grades a session from outside, a person for example.
``async with`` does the same without blocking the loop. An exception closes the session as ERROR and goes on.
"""

from rollmill.client.sessions import Session, reward, session
from rollmill.client.web import CaptureRefusedError, CaptureUnreachableError

__all__ = ["CaptureRefusedError", "CaptureUnreachableError", "Session", "reward", "session"]
