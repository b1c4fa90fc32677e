"""Settings of memory, of the coordinator, and of the HTTP API."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dovetail.protocol.settings.values import Frozen, byte_count, template_values

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#@]+")
"""An origin as browsers send it, or *."""


ANSWER_S = 60.0


def _size(value: str) -> str:
    byte_count(value)
    return value


Size = Annotated[str, AfterValidator(_size)]


class MemorySettings(Frozen):
    """The memory that a target may use for weights, buffers, a pass, and the keys and values of one
    long conversation; also those of a substitute that shares them."""

    vram: str = Field(
        "auto",
        description="GPU memory that target and draft may use, such as 7GB (10^9) or 7GiB (2^30); "
        "if the target is not on the GPU, only the draft uses it, and the CPU prefills; auto: the "
        "free memory",
    )
    ram: str = Field(
        "auto", description="the same for host RAM, such as 16GB; auto: the free memory"
    )

    @field_validator("vram", "ram")
    @classmethod
    def _size(cls, value: str) -> str:
        if value != "auto":
            byte_count(value)
        return value

    @property
    def vram_bytes(self) -> int | None:
        """None: auto."""
        return None if self.vram == "auto" else byte_count(self.vram)

    @property
    def ram_bytes(self) -> int | None:
        """None: auto."""
        return None if self.ram == "auto" else byte_count(self.ram)


class CacheSettings(Frozen):
    """The blocks of cached prompts that each worker stores."""

    memory: str = Field(
        "auto",
        description="memory of a worker for copies of the rows of prompts, such as 2GB, which "
        "outlive their sessions; auto: a sixteenth of the free memory; 0: none",
    )
    disk: Size = Field(
        "0",
        description="disk space in the cache folder for the same, such as 20GB, which outlive "
        "the worker; only its user may read them; 0: none",
    )

    @field_validator("memory")
    @classmethod
    def _amount(cls, value: str) -> str:
        return value if value == "auto" else _size(value)

    @property
    def memory_bytes(self) -> int | None:
        """None: auto."""
        return None if self.memory == "auto" else byte_count(self.memory)


class CoordinatorSettings(Frozen):
    """The process that owns the token logs."""

    listen: str = Field(
        "ipc",
        description="ipc (a socket in a private folder), ipc://PATH or tcp://HOST:PORT (needs "
        "keys)",
    )
    keys: str = Field("", description="folder of CURVE keys made by `dovetail keygen`")
    reuse: bool = Field(
        True,
        description="keep the caches of ended conversations, so that their next turns read "
        "only new tokens",
    )
    share_prefixes: Literal["key", "all"] = Field(
        "key",
        description="whose requests may reuse a cached prefix: key (those of the same API key) or "
        "all, which lets clients infer from cached_tokens and timing what others have sent",
    )
    remember: bool = Field(
        True,
        description="save in the cache folder what drafting costs and gains, so that the next run "
        "with these models and workers starts from it",
    )
    recovery_s: Annotated[float, Field(ge=0.0, le=86400.0)] | Literal["auto"] = Field(
        "auto",
        description="how long a session waits for another target when its own is lost; auto: 30 s "
        "plus twice the loading time of the lost one",
    )
    stuck_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        10.0, description="a process without progress for this long is replaced"
    )
    answer_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        ANSWER_S,
        description="how long commands, the HTTP API and workers wait for an answer from the "
        "coordinator",
    )
    latency_ms: Annotated[float, Field(gt=0.0, le=1e6)] | Literal["auto"] = Field(
        "auto",
        description="the longest target pass that may include a chunk of a prompt, so that running "
        "streams continue; auto: three times a round without one",
    )
    queue: Annotated[int, Field(ge=0, le=1 << 16)] = Field(
        256,
        description="how many requests may wait while no target has room for them; further ones "
        "are refused (429)",
    )
    key_queue: Annotated[int, Field(ge=0, le=1 << 16)] = Field(
        64, description="how many requests of one API key may wait; further ones are refused (429)"
    )
    key_sessions: Annotated[int, Field(ge=0, le=1 << 16)] = Field(
        0, description="how many requests of one API key may run at once; others wait; 0: no limit"
    )
    memory: Size = Field(
        "256MiB",
        description="limit on the memory of requests and replies, and on the journal's disk space; "
        "beyond it the oldest finished replies are dropped, then new requests are refused (429)",
    )
    lookup_memory: Size = Field(
        "0",
        description="memory for the tokens of earlier prompts and replies, in which look-ups also "
        "search, for requests of the same API key only; the oldest are dropped; 0: none",
    )
    move: Literal["same", "any"] = Field(
        "same",
        description="on which target a session continues if its own was lost: same (of equal "
        "fingerprint, so that the text is the same) or any with its vocabulary",
    )
    journal: Annotated[str, Field(min_length=1)] = Field(
        "auto",
        description="folder for the journal of requests and their tokens, which a restarted "
        "coordinator continues; auto: one in ~/.local/state/dovetail; off: requests end with the "
        "coordinator",
    )
    journal_s: Annotated[float, Field(ge=1.0, le=86400.0)] = Field(
        600.0,
        description="how long the journal keeps a reply that has ended or lost its client, for "
        "clients that reconnect",
    )
    record: str = Field(
        "",
        description="folder for a recording of every session, for `dovetail replay`: all its "
        "messages, including the text of users",
    )


class HttpSettings(Frozen):
    """The HTTP API of `dovetail serve`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port to listen on; 0: any free one"
    )
    api_key_file: str = Field(
        "",
        description="file with the API keys of clients, one per line, mode 0600, reread when it "
        "changes; required beyond loopback",
    )
    model: str = Field("", description="name under which the target is served; empty: its own")
    aliases: str = Field(
        "",
        description="other names of models, such as gpt-4o=smollm2,claude-*; without =, of the "
        "only one; *: any name",
    )
    deadline_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        600.0,
        description="longest time of a reply from its first token on, and of a request that makes "
        "no progress before it",
    )
    unload_s: Annotated[float, Field(ge=0.0, le=1e9)] = Field(
        300.0,
        description="if several models are served, one without a request for this long is "
        "unloaded; 0: never",
    )
    most_models: Annotated[int, Field(ge=0, le=1 << 16)] = Field(
        0,
        description="how many of several served models may be loaded at once; 0: as many as fit "
        "into memory",
    )
    receive_s: Annotated[float, Field(gt=0.0, le=3600.0)] = Field(
        20.0, description="time limit for receiving a request, and for a client that stops reading"
    )
    body: Size = Field("2MiB", description="largest body of a request")
    connections: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        4096, description="most open connections; further ones are refused with 503"
    )
    page: Literal["chat", "dashboard", "off"] = Field(
        "chat", description="the page at /; the dashboard is also at /dashboard"
    )
    dashboard: Literal["auto", "full", "anonymous", "off"] = Field(
        "auto",
        description="the page at /dashboard: full shows the tokens of all requests, anonymous none "
        "of them; auto: full without a key",
    )
    cors: str = Field(
        "",
        description="origins whose web pages may call the API from a browser, separated by commas, "
        "such as https://chat.example; *: all; empty: none",
    )
    fit: bool = Field(
        True,
        description="reduce a max_tokens that does not fit into the context, and report it in the "
        "reply; false: refuse such a request",
    )
    chat_template_kwargs: str = Field(
        "",
        description="JSON object: default values for the target's chat template, such as "
        "enable_thinking",
    )

    special_tokens: bool = Field(
        False,
        description="control tokens in the messages of chats are control tokens of the prompt; "
        "false: they are plain text",
    )
    reasoning: Literal["split", "inline"] = Field(
        "split",
        description="split: a model's thoughts are the reasoning_content of a reply; inline: they "
        "are part of its text",
    )
    reasoning_budget: Annotated[int, Field(ge=-1, le=1 << 20)] = Field(
        -1,
        description="tokens after which the thought of a chat's reply is ended, unless the request "
        "has a thinking_token_budget; -1: no limit",
    )
    tools: Literal["constrained", "free"] = Field(
        "constrained",
        description="constrained: a grammar keeps tool calls to the schemas of their tools; free: "
        "calls are read from what the model writes",
    )

    @model_validator(mode="after")
    def _page_is_there(self) -> Self:
        if self.page == "dashboard" and self.dashboard == "off":
            raise ValueError("page is dashboard, and dashboard is off: set page to chat or off")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_values(cls, value: str) -> str:
        template_values(value)
        return value

    @field_validator("cors")
    @classmethod
    def _origins(cls, value: str) -> str:
        origins = [origin.strip() for origin in value.lower().split(",") if value]
        if (wrong := next((one for one in origins if not ORIGIN.fullmatch(one)), None)) is not None:
            text = f"{wrong!r} is not an origin: write one such as https://chat.example:8443"
            raise ValueError(f"{text}, without a path, or *")
        return ",".join(origins)
