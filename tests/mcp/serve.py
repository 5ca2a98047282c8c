"""serve.py [PORT]: a server of MCP with one tool, made with the SDK for Python, which speaks both eras. Without a port, its
messages are lines on its standard input and output."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(first: int, second: int) -> str:
    """Adds two numbers."""
    return f"the sum is {first + second}"


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
