"""ask.py URL modern|legacy TOOL: lists the tools of a server with the SDK for Python, and calls one."""

import asyncio
import sys

import mcp

# The versions of the protocol that a connection must have, by era.
VERSIONS = {"modern": "2026-07-28", "legacy": "2025-11-25"}


async def main(url, era, tool):
    # Without a mode, the SDK asks the server which era it speaks.
    async with mcp.Client(url, mode="auto" if era == "modern" else era) as client:
        assert client.protocol_version == VERSIONS[era], client.protocol_version
        listed = await client.list_tools()
        assert [one.name for one in listed.tools] == [tool], listed
        called = await client.call_tool(tool, {})
        assert not called.is_error, called
        print(called.content[0].text)
        wrong = await client.call_tool(tool, {"zone": "UTC"})
        assert wrong.is_error and "invalid_arguments" in wrong.content[0].text, wrong
        try:
            await client.call_tool("no_such_tool", {})
        except mcp.MCPError as error:
            assert error.code == -32602, error
        else:
            raise AssertionError("an unknown tool has a result")


asyncio.run(main(*sys.argv[1:]))
