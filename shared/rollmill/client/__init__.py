"""Sessions at a capture, from an agent's harness: open, run, close. Uses Python's own HTTP, so that nothing is needed
beside ``pip install rollmill``.

    with rollmill.session(task="say-7", group="g1", group_size=8) as session:
        client = OpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        session.finish(output={"answer": 7}, reward=1.0)

``rollmill.client.reward(session_id, 0.5)`` grades a session from outside, a person for example.
``async with`` does the same without blocking the loop. An exception closes the session as ERROR and is raised again.

sessions: `Session`, `session`, `reward`. http_client: JSON requests with retries. May import errors and settings only.
"""

from rollmill.client.http_client import CaptureRefusedError, CaptureUnreachableError
from rollmill.client.sessions import Session, reward, session

__all__ = ["CaptureRefusedError", "CaptureUnreachableError", "Session", "reward", "session"]
