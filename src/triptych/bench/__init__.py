"""The benchmark client: asks any OpenAI-shaped server and measures what its users see.

It imports nothing of a server; one that it starts is a `triptych serve` in a process of its own.
"""
