"""The benchmark client: asks any OpenAI-shaped server and measures what its users see. It uses nothing of a server."""
