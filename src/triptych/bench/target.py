"""The server under test: its address, and what it says of itself."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from triptych.errors import ConfigError, TriptychError

ASK_S = 30


class Target(msgspec.Struct, frozen=True):
    """`about` is what `/v1/models` says of the model, empty if it says nothing."""

    url: str
    model: str
    about: dict[str, Any]


def base_of(base_url: str) -> str:
    """What all paths of a server are behind; `base_url` may end in `/v1` or not."""
    return base_url.rstrip("/").removesuffix("/v1")


async def find_target(base_url: str, endpoint: str, model: str | None, api_key: str | None) -> Target:
    """Reach the server, and take its first model if none is named. `base_url` may end in `/v1` or not.

    Raises ConfigError for an address or a model that cannot be right, TriptychError when nobody answers.
    """
    base = base_of(base_url)
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {base_url!r} does not start with http:// or https://")
    if not endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {endpoint!r} does not start with /, as /v1/chat/completions does")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=ASK_S, trust_env=False) as client:
            answer = await client.get(f"{base}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        found = f"{base} does not answer: {error or type(error).__name__}"
        raise TriptychError(f"{found}; start a server there (`triptych serve`), or give --base-url") from error
    models = _models(answer)
    if model is None:
        if not models:
            raise ConfigError(f"{base}/v1/models names no model (status {answer.status_code}); give --model")
        model = next(iter(models))
    elif models and model not in models:
        raise ConfigError(f"--model {model!r} is not served at {base}; it serves {', '.join(models)}")
    return Target(base + endpoint, model, models.get(model, {}))


def _models(answer: httpx.Response) -> dict[str, dict[str, Any]]:
    """name -> what is said of it; empty if the server does not list its models."""
    if answer.status_code != 200:
        return {}
    try:
        listed = msgspec.json.decode(answer.content, type=dict[str, Any]).get("data")
    except msgspec.DecodeError:
        return {}
    entries = listed if isinstance(listed, list) else []
    return {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
