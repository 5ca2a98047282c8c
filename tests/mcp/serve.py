"""serve.py PORT: a server of MCP with one tool, made with the SDK for Python, which speaks both eras."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(first: int, second: int) -> str:
    """Adds two numbers."""
    return f"the sum is {first + second}"


server.run("streamable-http", port=int(sys.argv[1]))
