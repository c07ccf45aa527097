"""The HTTP server. It reaches the engine through `cedar.server.protocols` only."""
