"""wait.py URL modern|legacy TOOL: calls a tool that waits for a person with the SDK for Python, and prints the progress and the result."""

import asyncio
import sys

import mcp


async def main(url, era, tool):
    told = []

    async def note(progress, _total, message):
        told.append(progress)
        print(progress, message)

    async with mcp.Client(url, mode="auto" if era == "modern" else era) as client:
        called = await client.call_tool(tool, {}, progress_callback=note)
    assert not called.is_error, called
    assert told and told == sorted(set(told)), told
    print(called.content[0].text)


asyncio.run(main(*sys.argv[1:]))
