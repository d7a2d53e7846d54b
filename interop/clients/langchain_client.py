"""langchain-openai, unmodified, against a running server: langchain_client.py URL MODEL"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI


def main(url: str, model: str) -> None:
    """Asks whole, streamed and with log-probabilities."""
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=24, max_retries=0)
    messages = [("system", "Be brief."), ("human", "Name three colours.")]
    whole = chat.invoke(messages)
    assert whole.content and 0 < whole.usage_metadata["output_tokens"] <= 24, whole
    assert "".join(chunk.content for chunk in chat.stream(messages)) == whole.content
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(scored.response_metadata["logprobs"]["content"]) == scored.usage_metadata["output_tokens"]
    batch = chat.batch(["one", "two", "three"])
    assert len(batch) == 3 and all(answer.content for answer in batch)
    print(json.dumps({"client": "langchain-openai", "version": version("langchain-openai"), "passed": True}))


if __name__ == "__main__":
    main(*sys.argv[1:])
