#!/usr/bin/env bash
# aiohttp 3.14.5, server: a request body with "Content-Encoding: gzip" whose end is missing is taken as complete.
# The last 8 bytes of a gzip file are its checksum and length. A body without them, or one that is cut in the middle of
# the compressed data, raises nothing in request.read(): the handler gets what could be decompressed so far, although a
# body that is no gzip at all raises RequestPayloadError. Whoever reads records from such bodies has to check by other
# means (a count, a last line) that none is lost; JSON shows a cut by itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet aiohttp==3.14.5
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import gzip
import random

import aiohttp
from aiohttp import web

TEXT = "".join(f"{random.Random(n).random()}\n" for n in range(20000)).encode()
WHOLE = gzip.compress(TEXT)


async def read(request: web.Request) -> web.Response:
    try:
        return web.Response(text=str(len(await request.read())))
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=type(error).__name__)


async def main() -> None:
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/", read)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    found = {}
    bodies = {"whole": WHOLE, "without its trailer": WHOLE[:-8], "half of it": WHOLE[: len(WHOLE) // 2], "no gzip": TEXT}
    async with aiohttp.ClientSession() as client:
        for name, body in bodies.items():
            async with client.post(url, data=body, headers={"Content-Encoding": "gzip"}) as answer:
                found[name] = (answer.status, await answer.text())
                print(f"{name}: status {answer.status}, {found[name][1]} of {len(TEXT)} bytes")
    await runner.cleanup()
    assert found["whole"] == (200, str(len(TEXT))), "a whole body is no longer read as it was"
    assert found["without its trailer"][0] == 200, "a body without its trailer is refused now"
    assert found["half of it"][0] == 200, "half of a body is refused now"
    assert 0 < int(found["half of it"][1]) < len(TEXT), "half of a body gives something else now"
    assert found["no gzip"][0] == 400, "a body that is no gzip is no longer refused"


asyncio.run(main())
PYTHON
