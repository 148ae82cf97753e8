"""A service whose worker ends without a stop request: it returns, or a callback of its loop calls ``sys.exit()``."""

from __future__ import annotations

import asyncio
import os
import sys

from rollmill.runtime.app import Service, ServiceContext, run
from rollmill.settings import ServiceSettings


async def end(context: ServiceContext) -> None:
    if os.environ["ENDS_BY"] == "callback":
        asyncio.get_running_loop().call_soon(sys.exit)
        await context.stop.wait()


if __name__ == "__main__":
    sys.exit(run(Service("ending", ServiceSettings(), workers=(end,))))
