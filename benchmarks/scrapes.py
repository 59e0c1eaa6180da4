"""The samples on a service's metrics page."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 30.0


async def scraped(url: str) -> list[Sample]:
    """Read the page. Raise OSError when the service is away, and HTTPException when it goes away meanwhile."""

    def read() -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read(), "utf-8")

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return [one for family in families for one in family.samples]
